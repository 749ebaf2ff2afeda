"""Scatters verified changed elements into the live weights of a running SGLang server.

Loaded by stock SGLang (`--custom-weight-loader miles_inplace.apply`) and called between two batches by
`/update_weights_from_tensor`. Three requests come that way: `open` records the map and starts a thread that listens on
a Unix socket (`session`), `commit` puts what that thread has prepared in place, and `call` has a request answered here,
while the engine serves nothing. What else is slow happens in the thread while the server serves. Nothing here raises
into the scheduler; what went wrong is told through the socket, or in a file.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from .session import Session

log = logging.getLogger(__name__)
_ATTRIBUTE = "_miles_inplace_session"


def apply(model: Any, named_tensors: Any) -> None:
    """SGLang's hook. named_tensors: [("request", uint8 tensor of JSON)]. Never raises."""
    try:
        request = json.loads(bytes(dict(named_tensors)["request"].cpu().tolist()))
        session: Session | None = getattr(model, _ATTRIBUTE, None)
        if request["op"] == "open":
            if session is not None:
                session.close()
            setattr(model, _ATTRIBUTE, Session(model, request["directory"], request["checkpoint"]))
        elif request["op"] == "commit" and session is not None:
            session.commit(request["id"])
        elif request["op"] == "call" and session is not None:
            session.call(request["id"], request["request"])
        else:
            log.error("miles_inplace: %s without an open session", request["op"])
    except BaseException:
        log.exception("miles_inplace: request failed; the weights may need a reload")
