"""Whole chunks of a damaged shard, and the entries that they belong to.

A chunk that decodes does not say which one it is, because some writers store chunks as they come.
Under a wrong key it would be worse than missing. So each chunk needs a proof: decision 33 has all.
"""
