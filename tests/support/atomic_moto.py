"""moto's server of S3, with writes that are one step.

S3 looks at the condition of a write and stores the object in one step. moto does the one, and then
the other; between them the interpreter may switch to another thread (every 5 ms). Of 10,000
conditional writes of 140 kB by writers that compete on a busy machine, one was seen to succeed
beside another with the same condition: an update that the server confirmed, and lost.
"""

from __future__ import annotations

import sys
import threading
from typing import Any
from unittest import mock

from moto.s3.responses import S3Response
from moto.server import main

_put_object = S3Response.put_object
_lock = threading.Lock()


def _put_in_one_step(response: Any) -> Any:
    with _lock:
        return _put_object(response)


if __name__ == "__main__":
    with mock.patch.object(S3Response, "put_object", _put_in_one_step):
        main(sys.argv[1:])
