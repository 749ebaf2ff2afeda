"""Reward as a service of its own: answers each sample that is posted to it with how short the right answer is put.

    python -m examples.reward_server --port 9000
    --rm-type remote_rm --rm-url http://localhost:9000/score

It gets `{"prompt", "response", "label", "metadata"}` and answers `{"reward": x}`; any other answer, or none in time, is
a failed sample, counted under `reward_error` and tried again.
"""

import argparse

from aiohttp import web


def score(response: str, label: str) -> float:
    """0 without the label in the response, else the label's share of the response: 1 for the bare answer."""
    return len(label) / len(response) if label and label in response else 0.0


async def answer(request: web.Request) -> web.Response:
    """One sample in, its reward out."""
    sample = await request.json()
    return web.json_response({"reward": score(sample["response"], sample["label"] or "")})


def application() -> web.Application:
    """The service: POST /score."""
    app = web.Application()
    app.router.add_post("/score", answer)
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9000)
    web.run_app(application(), port=parser.parse_args().port)
