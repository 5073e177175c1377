"""Whole chunks of a damaged shard, and the entries that they belong to.

A chunk that decodes does not say which one it is, because some writers store chunks as they come.
Under a wrong key it would be worse than missing. So each chunk needs a proof, in this order:

1. *An index with a right checksum*, in any form; or one without a checksum that begins where the
   data end (`salvage`).
2. *A copy in the consolidated index*, if it belongs to this state of the shard (`salvage`).
3. *The checksum of a damaged index*: a small change makes it right again (`indexes`).
4. *Entries of a damaged or cut index*, one by one (`indexes`).
5. *An older index* that a writer has left in the file (`indexes`). No writer overwrites the bytes
   of an entry, so these are older values of the same chunks.
6. *A statement of the user*: the shard was full, and written in this order (`salvage`). Appends
   come in any order, zarrs stores some shards as its threads are ready, and several programs may
   have written one array. The only chunk of a shard needs no order.

Frames alone are no proof: decisions/0033 has the cases in which their keys would be wrong.
"""
