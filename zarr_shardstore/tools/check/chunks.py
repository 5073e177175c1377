"""Checks of one encoded chunk: its checksums, the header of its frame, and its decoding by zarr."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import crc32c
import zstandard
from zarr.core.array import create_codec_pipeline
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata import ArrayV2Metadata, ArrayV3Metadata
from zarr.core.sync import sync

from zarr_shardstore.access import ChunkCodec, chunk_keys, transformer_list
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.check.findings import Kind
from zarr_shardstore.tools.check.salvage.frames import MAGIC

Problem: TypeAlias = tuple[Kind, str] | None
"""Damage of a chunk: its kind, and the contradiction."""


def codec_names(view: Mapping[str, Any]) -> list[str]:
    """Return the codecs that change the bytes of a chunk, the nearest to the array first."""
    if view.get("zarr_format") == 2:
        given = [*(view.get("filters") or ()), view.get("compressor")]
        # numcodecs may place its checksum before the bytes.
        ids = [str(config["id"]) for config in given if config is not None]
        return [f"numcodecs.{name}" if name == "crc32c" else name for name in ids]
    names = [str(transformer_list.name_of(codec)) for codec in view["codecs"]]
    names = [name for name in names if name not in ("transpose", "bytes")]
    return [n if n == "numcodecs.crc32c" else n.removeprefix("numcodecs.") for n in names]


_WITH_CHECKSUM = {
    "adler32",
    "bz2",
    "crc32",
    "crc32c",
    "fletcher32",
    "gzip",
    "jenkins_lookup3",
    "zlib",
}


def has_checksum(view: Mapping[str, Any]) -> bool:
    """Whether a codec of an array stores a checksum that a decoder compares."""
    given = [*(view.get("filters") or ()), view.get("compressor"), *view.get("codecs", ())]
    configs = [codec.get("configuration", codec) for codec in given if isinstance(codec, Mapping)]
    names = {name.removeprefix("numcodecs.") for name in codec_names(view)}
    return bool(names & _WITH_CHECKSUM) or any(config.get("checksum") for config in configs)


def problem_of_frame(names: Sequence[str], value: Any, nbytes: int | None) -> Problem:
    """Return the damage that the checksums around a frame, or its header, show."""
    view = memoryview(value)
    for n, name in reversed(list(enumerate(names))):
        if name != "crc32c":
            text = _bad_header(name, view, nbytes if n == 0 else None)
            return None if text is None else ("chunk_undecodable", f"{name}: {text}")
        stored, view = int.from_bytes(view[-4:], "little"), view[:-4]
        if stored != (computed := crc32c.crc32c(view)):
            text = f"the checksum is {stored:#010x}, the bytes give {computed:#010x}"
            return "chunk_checksum", text
    if nbytes is not None and len(view) != nbytes:
        return "chunk_size", f"the chunk has {len(view)} bytes, not {nbytes}"
    return None


def _bad_header(name: str, value: memoryview, nbytes: int | None) -> str | None:
    head = bytes(value[:18])
    size: int | None = None
    match name:
        case "zstd" if not (head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50):
            try:
                size = zstandard.frame_content_size(value)
            except (zstandard.ZstdError, ValueError) as error:
                return str(error)
            # Other frames may follow the first one.
            return _other_size(size, nbytes) if nbytes is not None and size > nbytes else None
        case "gzip" | "bz2" if not head.startswith(MAGIC[name]):
            return f"it begins with {head[:3]!r}"
        case "zlib" if len(head) < 2 or head[0] & 15 != 8 or int.from_bytes(head[:2]) % 31:
            return f"it begins with {head[:2]!r}"
        case "blosc":
            if len(head) < 16:
                return f"it has {len(value)} bytes, its header alone takes 16"
            size, stored = (int.from_bytes(head[i : i + 4], "little") for i in (4, 12))
            if stored > len(value):
                return f"it has {len(value)} bytes, its header says {stored}"
        case "lz4":
            size = int.from_bytes(head[:4], "little") if len(head) >= 4 else -1
    return None if size is None or nbytes in (None, size) else _other_size(size, nbytes)


def _other_size(size: int, nbytes: int | None) -> str:
    return f"the header says {size} bytes, the chunk has {nbytes}"


def parsed_by_zarr(doc: Mapping[str, Any]) -> Any:
    """Return the metadata of zarr for an array document, which stays as it is."""
    of_format: Any = ArrayV2Metadata if doc.get("zarr_format") == 2 else ArrayV3Metadata
    return of_format.from_dict(json.loads(json.dumps(doc)))


def _pipeline(view: Mapping[str, Any], shape: chunk_keys.Coords) -> tuple[Any, ArraySpec]:
    metadata = parsed_by_zarr(view)
    config = ArrayConfig.from_dict({"order": view.get("order", "C")})
    prototype = default_buffer_prototype()
    spec = ArraySpec(shape, metadata.dtype, metadata.fill_value, config, prototype)
    return create_codec_pipeline(metadata), spec


_CODING = ("zarr_format", "codecs", "data_type", "dtype", "order", "filters", "compressor")


def transcoder(
    view: Mapping[str, Any], to: Mapping[str, Any], shape: chunk_keys.Coords
) -> Callable[[Any], bytes]:
    """Return a function that encodes a chunk of one array for another; with equal codecs the bytes
    stay. Raises `SpecError` if the data types differ."""
    if all(view.get(name) == to.get(name) for name in _CODING):
        return bytes
    (old, spec), (new, new_spec) = _pipeline(view, shape), _pipeline(to, shape)
    dtypes = [each.dtype.to_native_dtype() for each in (spec, new_spec)]
    native = [each if each.kind in "TO" else each.newbyteorder("=") for each in dtypes]
    if native[0] != native[1]:
        raise SpecError(f"the data type is {dtypes[0]}, and not {dtypes[1]}")

    def transcode(value: Any) -> bytes:
        buffer = spec.prototype.buffer.from_bytes(bytes(value))
        (chunk,) = sync(old.decode([(buffer, spec)]))
        values = chunk.as_numpy_array().astype(dtypes[1], copy=False)
        values = new_spec.prototype.nd_buffer.from_numpy_array(values)
        (encoded,) = sync(new.encode([(values, new_spec)]))
        return bytes(encoded.to_bytes())

    return transcode


def decoder(view: dict[str, Any], shape: chunk_keys.Coords) -> Callable[[Any], Problem]:
    """Return a function that decodes a chunk by the codecs of zarr, as a read does."""
    pipeline, spec = _pipeline(view, shape)
    codec = ChunkCodec.of(list(pipeline))
    plain = None if codec is None else codec.plain(spec)
    nbytes = math.prod(shape) * spec.dtype.to_native_dtype().itemsize

    def decode(value: Any) -> Problem:
        try:
            if plain is not None:
                data = value if plain.decompress is None else plain.decompress(value)
                if (found := memoryview(data).nbytes) != nbytes:
                    return "chunk_size", f"it decodes to {found} bytes, not {nbytes}"
                return None
            buffer = spec.prototype.buffer.from_bytes(bytes(value))
            chunk: Any
            if codec is not None:
                chunk = codec.decode(buffer, spec)
            else:
                (chunk,) = sync(pipeline.decode([(buffer, spec)]))
            if chunk.shape != shape:
                return "chunk_size", f"it decodes to the shape {chunk.shape}, not {shape}"
        except MemoryError:  # no damage
            raise
        except Exception as error:
            return "chunk_undecodable", f"{type(error).__name__}: {error}"
        return None

    return decode
