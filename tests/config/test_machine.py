"""A port that somebody else takes between the choice and the start of the server."""

import socket

import pytest

from miles_disagg.config.machine import free_port, on_free_ports
from miles_disagg.domain.errors import PortTaken


class Race:
    """A server that is started while others take the first `lost` ports that were chosen for it."""

    def __init__(self, lost: int):
        self.lost = lost
        self.chosen: list[int] = []
        self.sockets: list[socket.socket] = []

    def listen(self, port: int) -> socket.socket:
        self.sockets.append(socket.create_server(("127.0.0.1", port)))
        return self.sockets[-1]

    async def start(self) -> int:
        port = free_port()
        self.chosen.append(port)
        if len(self.chosen) <= self.lost:
            self.listen(port)  # somebody else's
        try:
            return self.listen(port).getsockname()[1]
        except OSError as error:
            raise PortTaken(f"{port}: {error.strerror}") from None


@pytest.fixture
def race():
    races: list[Race] = []

    def of(lost: int) -> Race:
        races.append(Race(lost))
        return races[-1]

    yield of
    for each in races:
        for listening in each.sockets:
            listening.close()


async def test_a_server_whose_port_is_taken_first_is_started_on_another_one(race):
    for lost in (0, 1, 2):
        server = race(lost)
        assert await on_free_ports(server.start) == server.chosen[-1]
        assert len(set(server.chosen)) == lost + 1


async def test_a_server_that_loses_every_time_is_tried_three_times_and_names_the_last_port(race):
    server = race(99)
    with pytest.raises(PortTaken, match="Address already in use") as caught:
        await on_free_ports(server.start)
    assert len(server.chosen) == 3
    assert str(caught.value).startswith(f"{server.chosen[-1]}:")


async def test_a_given_port_is_tried_once(race):
    server = race(1)
    with pytest.raises(PortTaken):
        await on_free_ports(server.start, given=True)
    assert len(server.chosen) == 1
