"""Stores for URLs of S3, Google Cloud Storage and Azure: obstore if it can, otherwise fsspec.

obstore writes with conditions, so that several processes may write one shard; fsspec cannot. Each
option of the caller is understood by the client that is chosen, or there is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from typing import Any
from urllib.parse import quote

import fsspec
from zarr.abc.store import Store
from zarr.storage import FsspecStore, ObjectStore

from zarr_shardstore.errors import SpecError

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
EXTRAS |= dict.fromkeys(("az", "abfs", "abfss"), "azure")
"""Extra of this package that installs a client, by the scheme of a URL."""

_S3_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
}
"""obstore's names of s3fs's options, and of those in its ``client_kwargs``."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "azure": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
"""Variables that obstore reads; without a permission it refuses plain HTTP there."""

_CREDENTIALS = {"access_key_id", "aws_access_key_id", "skip_signature", "aws_skip_signature"}


def store_of_url(url: str, options: Mapping[str, Any]) -> Store:
    """Return the store at a URL that is no local path. Chains such as ``simplecache::s3://`` and
    other schemes are fsspec's. Raise `ImportError`, naming an extra, if no client is installed."""
    scheme, _, place = url.partition("://")
    extra = EXTRAS.get(scheme)
    refusal, known = "", list[str]()
    if extra is not None:
        try:
            from obstore.exceptions import UnknownConfigurationKeyError
            from obstore.store import from_url
        except ImportError:
            refusal = f'install obstore: pip install "zarr-shardstore[{extra}]"'
        else:
            host, _, path = place.partition("/")
            # fsspec takes a path as it is spelled, obstore takes off a query and "%20".
            quoted = f"{scheme.replace('gcs', 'gs')}://{host}/{quote(path)}"

            def client_of(given: Mapping[str, Any]) -> Any:
                try:
                    return from_url(quoted, **given)
                except UnknownConfigurationKeyError:
                    return None
                except Exception as error:
                    reason = str(error).partition("\n")[0]
                    raise SpecError(
                        f"{url!r} with the options {sorted(given)}: {reason}"
                    ) from error

            translated = _translated(options, extra)
            client = None if translated is None else client_of(translated)
            if client is not None:
                return ObjectStore(client)
            refusal = f"obstore does not know all of the options {sorted(options)}"
            known = [name for name in options if _is_of_obstore(name, client_of)]
    try:
        if known:
            accepted = signature(fsspec.get_filesystem_class(scheme).__init__).parameters
            if only_of_obstore := [name for name in known if name not in accepted]:
                raise SpecError(
                    f"{refusal}, and of {only_of_obstore} fsspec knows nothing: spell all of "
                    "storage_options as one of the two does"
                )
        return FsspecStore.from_url(url, storage_options=dict(options))
    except ImportError as error:
        if not refusal:
            raise
        raise ImportError(f"{url!r}: {refusal}; for fsspec: {error}") from error


def _is_of_obstore(name: str, client_of: Any) -> bool:
    try:
        return client_of({name: ""}) is not None
    except SpecError:  # a known name with a wrong value
        return True


def _translated(options: Mapping[str, Any], extra: str) -> dict[str, Any] | None:
    """Return options as obstore spells them; ``None`` if only fsspec has what they ask for."""
    nested = options.get("client_kwargs") or {}
    given = {k: v for k, v in options.items() if k != "client_kwargs"}
    names = _S3_NAMES if extra == "s3" else {"anon": "skip_signature"}
    if extra == "gcs" and given.get("token") == "anon":
        given["anon"] = bool(given.pop("token"))
    if extra == "azure" and not given and "AZURE_STORAGE_CONNECTION_STRING" in os.environ:
        return None
    if not isinstance(nested, Mapping) or not nested.keys() <= {"endpoint_url", "region_name"}:
        return None
    translated: dict[str, Any] = {}
    value: Any
    for name, value in [*given.items(), *nested.items()]:
        if value is None:
            continue
        if translated.setdefault(names.get(str(name), str(name)), value) != value:
            return None
    if extra == "s3" and not translated.keys() & _CREDENTIALS:
        profile = _of_profile()
        if profile is None:
            return None
        translated = {**profile, **translated}
    endpoints = [value for name, value in translated.items() if "endpoint" in name.lower()]
    endpoints = endpoints or [os.environ.get(name) for name in _ENDPOINTS.get(extra, ())]
    if any(str(endpoint).startswith("http://") for endpoint in endpoints):
        translated["client_options"] = {"allow_http": True, **translated.get("client_options", {})}
    return translated


def _of_profile() -> dict[str, str] | None:
    """Return keys and region of the user's AWS profile, which obstore does not read; ``None`` if
    the profile gets its keys in a way that only botocore knows."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    try:
        from botocore.session import Session
    except ImportError:
        return {}
    session = Session()
    providers = session.get_component("credential_provider").providers
    files = [p for p in providers if p.METHOD in ("shared-credentials-file", "config-file")]
    keys = next((keys for p in files if (keys := p.load()) is not None), None)
    if keys is None:
        return None if "AWS_PROFILE" in os.environ else {}
    found = {
        "access_key_id": keys.access_key,
        "secret_access_key": keys.secret_key,
        "session_token": keys.token,
        "region": os.environ.get("AWS_REGION") or session.get_config_variable("region"),
    }
    return {name: value for name, value in found.items() if value}
