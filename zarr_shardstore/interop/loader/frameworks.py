"""Faces of a loader to frameworks: numpy, torch, jax, xarray. Each is imported when it is used."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from zarr_shardstore.errors import SpecError, UnsupportedError

if TYPE_CHECKING:
    from zarr_shardstore.interop.loader.loader import ShardLoader

_MAPPED_NBYTES = 128 * 1024
"""Size of memory that is mapped by itself."""

Framework: TypeAlias = Literal["numpy", "torch", "jax"]


class Converter(NamedTuple):
    """Functions that make the arrays of a framework."""

    dense: Callable[[npt.NDArray[Any]], Any]
    """From an array, whose memory is shared."""
    sparse: Any
    """From elements, their columns, the ends of the rows, and a shape."""
    allocate: Callable[[int], Any]
    """Allocates the memory of arrays."""
    reuses_memory: bool = True
    """False: torch copies pinned memory after the last reference, and uses it again by itself."""


def converter_of(
    to: Framework, dtypes: Mapping[str, np.dtype[Any]], are_sparse: bool = False
) -> Converter:
    """Return functions for arrays of these types, by their paths."""
    sparse = _sparse_of(to) if are_sparse else None
    if to == "numpy":
        return Converter(np.asarray, sparse, _pageable)
    for path, dtype in dtypes.items():
        if dtype.kind not in "biufc":
            raise SpecError(
                f"{path!r} has the data type {dtype}, which {to} lacks: leave it out, or take "
                "numpy arrays, and convert them in `transform`"
            )
    if to == "jax":
        for dtype in dtypes.values():
            _check_that_jax_keeps(dtype)
        return Converter(_jax_array, sparse, _pageable)
    if to == "torch":
        import torch

        pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=True)
        has_cuda = torch.cuda.is_available()
        allocate = (lambda n: pinned(n).numpy()) if has_cuda else _pageable
        return Converter(torch.from_numpy, sparse, allocate, reuses_memory=not has_cuda)
    raise SpecError(f"to is 'numpy', 'torch' or 'jax', got {to!r}")


def _pageable(nbytes: int) -> npt.NDArray[np.uint8]:
    """Allocate memory, which goes back to the system when it is freed.

    The arenas of glibc would keep it, one for each thread.
    """
    if nbytes < _MAPPED_NBYTES or sys.platform == "win32":
        return np.empty(nbytes, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


def _sparse_of(to: Framework) -> Callable[[Any, Any, Any, tuple[int, int]], Any]:
    if to == "numpy":
        from scipy.sparse import csr_array

        def of_scipy(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
            matrix = csr_array(shape)  # with arrays, it would copy most views
            matrix.data, matrix.indptr = data, indptr
            matrix.indices = indices.astype(indptr.dtype, copy=False)
            return matrix

        return of_scipy
    if to == "jax":
        from jax.experimental.sparse import BCSR

        return lambda data, indices, indptr, shape: BCSR((data, indices, indptr), shape=shape)
    import torch

    of_torch = partial(torch.sparse_csr_tensor, check_invariants=False)
    return lambda data, indices, indptr, shape: of_torch(indptr, indices, data, shape)


def _jax_array(array: npt.NDArray[Any]) -> Any:
    import jax

    _check_that_jax_keeps(array.dtype)  # the setting may be that of one thread
    return jax.dlpack.from_dlpack(array) if array.size else jax.numpy.asarray(array)


def _check_that_jax_keeps(dtype: np.dtype[Any]) -> None:
    import jax

    if (kept := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        raise SpecError(
            f"jax would make {kept} of {dtype}: call jax.config.update('jax_enable_x64', True), "
            "or take numpy arrays, and cast them in `transform`"
        )


def torch_dataset(loader: ShardLoader) -> Any:
    """Return a loader as a ``torch.utils.data.IterableDataset`` of whole batches."""
    from torch.utils import data

    class LoaderDataset(data.IterableDataset):  # type: ignore[misc]
        __len__ = loader.__len__
        state_dict, load_state_dict = loader.state_dict, loader.load_state_dict

        def __iter__(self) -> Iterator[Any]:
            if data.get_worker_info() is not None:
                self.__reduce__()
            return iter(loader)

        def __reduce__(self) -> NoReturn:
            # Worker processes that are spawned get a pickle.
            raise UnsupportedError(
                "the loader reads and decodes in threads of this process: each worker process "
                "would read all samples again, so pass num_workers=0"
            )

    return LoaderDataset()


def arrays_of_dataset(ds: Any) -> tuple[Any, dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the store of the variables of a dataset of xarray, their paths and dimensions."""
    arrays = {name: _stored_array_of(v, name) for name, v in ds.data_vars.items()}
    stores = [array.store for array in arrays.values()]
    if not stores or any(store is not stores[0] and store != stores[0] for store in stores):
        raise SpecError("the variables of the dataset are arrays of one store")
    dims = {name: tuple(map(str, variable.dims)) for name, variable in ds.data_vars.items()}
    return stores[0], {name: array.path for name, array in arrays.items()}, dims


def _stored_array_of(variable: Any, name: str) -> Any:
    """Return the array of zarr below the lazy arrays of xarray, if it has the same values."""
    data = variable.variable._data
    while (kind := type(data).__name__) != "ZarrArrayWrapper":
        is_same = kind in ("MemoryCachedArray", "CopyOnWriteArray")
        if kind == "LazilyIndexedArray":
            keys = zip(data.key.tuple, data.array.shape, strict=True)
            is_same = all(isinstance(key, slice) and range(n)[key] == range(n) for key, n in keys)
        if not is_same:
            raise UnsupportedError(
                f"xarray has {name!r} in memory, computes it, or takes a part or another order "
                f"({kind}): pass the whole dataset, as xarray.open_zarr(ShardingStore(…), "
                "chunks=None, decode_cf=False) returns it, and compute in `transform`"
            )
        data = data.array
    return data.get_array()
