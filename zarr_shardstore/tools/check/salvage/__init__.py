"""Chunks of a damaged shard that are whole, and the entries that they belong to.

A chunk that decodes does not say which one it is: some writers store chunks in the order in which
they come. Under a wrong key it would be worse than missing. So each chunk needs a proof, and each
kind of evidence has a file. They are asked in this order:

1. *An index with a right checksum*, in the declared form or in another one, is believed. So is an
   index without a checksum, if it begins where the data end (`salvage`).
2. *A copy in the consolidated index*, if it is that of this state of the shard (`salvage`).
3. *The checksum of a damaged index*: a small change makes it right again (`corrected`).
4. *Entries of a damaged or cut index*, one by one (`entries`).
5. *An older index*, which a writer has left in the file (`older_indexes`). Bytes of an entry are
   never written again, so these are older values of the same chunks.
6. *The user*, who says that the shard was full, and in which order it was written (`orders`). The
   only chunk that a shard may have needs no order.

Frames alone prove nothing, also where they fill the shard and all other shards of the array are in
one order: decisions/0033 has the cases in which the keys would be wrong.
"""
