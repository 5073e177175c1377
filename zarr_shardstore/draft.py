"""The former place of `DraftHierarchyStore`, which pickles name."""

import sys

from zarr_shardstore.interop.draft import hierarchy_store

sys.modules[f"{__name__}.hierarchy_store"] = hierarchy_store
