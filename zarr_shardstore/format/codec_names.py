"""Compressors: numcodecs configurations, as the draft and Zarr v2 have them, and v3 codecs.

=========  ==========================================================  ================
id         draft: ``codec`` is this URI                                v3
=========  ==========================================================  ================
``gzip``   ``https://purl.org/zarr/spec/codec/gzip/1.0``               ``gzip``
``blosc``  and so on                                                   ``blosc``
``zstd``                                                               ``zstd``
``zlib``                                                               ``numcodecs.zlib``
``bz2``, ``lz4``, ``lzma``                                             the same
=========  ==========================================================  ================

A *config* is the parsed JSON object of numcodecs: ``{"id": "gzip", "level": 1}``.

Source: Zarr v3 core, "Codecs"; the draft as zarr-python 2.13 to 2.18 write it,
``zarr/meta.py``; numcodecs, ``get_config`` of each codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.transformer_specs import name_of

__all__ = [
    "codec_of_compressor",
    "compressor_of_codec",
    "config_of_draft",
    "draft_compressor",
    "is_compressor",
    "name_and_options",
]

Config = dict[str, Any]

_URI = "https://purl.org/zarr/spec/codec/"
_NUMCODECS = "numcodecs."

_DEFAULTS: dict[str, Config] = {
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    "bz2": {"level": 1},
    "gzip": {"level": 1},
    "lz4": {"acceleration": 1},
    "lzma": {"format": 1, "check": -1, "preset": None, "filters": None},
    "zlib": {"level": 1},
    "zstd": {"level": 0, "checksum": False},
}
"""What numcodecs takes for options that a configuration leaves out."""

_NATIVE = ("blosc", "gzip", "zstd")
"""Codecs that v3 itself names."""

_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")
"""v3's words for numcodecs' numbers."""

_AUTO_SHUFFLE = -1
_MAX_TYPESIZE = 255


def codec_of_compressor(config: Mapping[str, Any], itemsize: int) -> Config:
    """The v3 codec that decodes what a numcodecs compressor wrote.

    Parameters
    ----------
    config
        With its ``id``.
    itemsize
        Bytes of a value of the array; Blosc shuffles by it.

    Raises
    ------
    UnsupportedError
        If the compressor, or one of its options, is not known.

    Examples
    --------
    >>> codec_of_compressor({"id": "zlib", "level": 3}, itemsize=4)
    {'name': 'numcodecs.zlib', 'configuration': {'level': 3}}
    """
    name = config.get("id")
    options = {k: v for k, v in config.items() if k != "id"}
    if name == "blosc":
        options.pop("typesize", None)
    options = _complete(name, options)
    if name == "blosc":
        shuffle = options["shuffle"]
        if shuffle == _AUTO_SHUFFLE:
            shuffle = 2 if itemsize == 1 else 1
        if shuffle not in range(len(_SHUFFLES)):
            raise SpecError(f"Blosc has no shuffle {shuffle!r}")
        typesize = itemsize if itemsize <= _MAX_TYPESIZE else 1  # what Blosc itself makes of it
        options = {"typesize": typesize, **options, "shuffle": _SHUFFLES[shuffle]}
    v3_name = name if name in _NATIVE else f"{_NUMCODECS}{name}"
    return {"name": v3_name, "configuration": options}


def compressor_of_codec(codec: Any) -> Config:
    """The numcodecs configuration, with its ``id``, of a v3 codec that compresses.

    Raises
    ------
    UnsupportedError
        If the codec is none of those above.

    Examples
    --------
    >>> compressor_of_codec({"name": "zstd", "configuration": {"level": 3}})
    {'id': 'zstd', 'level': 3, 'checksum': False}
    """
    v3_name, options = name_and_options(codec)
    name = v3_name.removeprefix(_NUMCODECS)
    if name not in _DEFAULTS or (v3_name == name and name not in _NATIVE):
        raise UnsupportedError(
            f"the codec {v3_name!r} cannot be translated: take one of "
            f"{', '.join(sorted(_DEFAULTS))}"
        )
    if name == "blosc":
        options.pop("typesize", None)
        if options.get("shuffle") in _SHUFFLES:
            options["shuffle"] = _SHUFFLES.index(options["shuffle"])
        elif v3_name == name:
            raise SpecError(f"the codec 'blosc' has no shuffle {options.get('shuffle')!r}")
    return {"id": name, **_complete(name, options)}


def is_compressor(name: Any) -> bool:
    """Whether a numcodecs ``id`` is that of a compressor above."""
    return name in _DEFAULTS


def config_of_draft(compressor: Mapping[str, Any]) -> Config:
    """The numcodecs configuration of a draft document's compressor.

    Raises
    ------
    UnsupportedError
        If its URI is none of those above.
    """
    uri = compressor.get("codec")
    name = uri.removeprefix(_URI).split("/")[0] if isinstance(uri, str) else None
    if name not in _DEFAULTS or not str(uri).startswith(f"{_URI}{name}/"):
        raise UnsupportedError(f"the compressor {uri!r} is not known")
    return {**(compressor.get("configuration") or {}), "id": name}


def draft_compressor(config: Mapping[str, Any]) -> Config:
    """A draft document's compressor, from its numcodecs configuration.

    >>> draft_compressor({"id": "gzip", "level": 1})["codec"]
    'https://purl.org/zarr/spec/codec/gzip/1.0'
    """
    options = {k: v for k, v in config.items() if k != "id"}
    return {"codec": f"{_URI}{config['id']}/1.0", "configuration": options}


def name_and_options(codec: Any) -> tuple[str, Config]:
    """Name and configuration of a v3 codec, which may be spelled as a bare name.

    ``endian`` is another name of ``bytes``.

    Raises
    ------
    SpecError
        If it is no codec.
    """
    name = name_of(codec)
    configuration = codec.get("configuration") if isinstance(codec, Mapping) else None
    if isinstance(name, str) and isinstance(configuration, Mapping | None):
        return name, dict(configuration or {})
    raise SpecError(f"{codec!r} is no codec")


def _complete(name: Any, options: Config) -> Config:
    """Options with the defaults that were left out; the order is that of the defaults."""
    defaults = _DEFAULTS.get(name)
    if defaults is None:
        raise UnsupportedError(
            f"the compressor {name!r} cannot be translated: only {', '.join(sorted(_DEFAULTS))} can"
        )
    unknown = options.keys() - defaults.keys()
    if unknown:
        raise UnsupportedError(f"the compressor {name!r} has unknown options {sorted(unknown)}")
    return {**defaults, **options}
