"""One pool for many clients: what one has computed, all others hit."""

from tests.wire.daemons import Daemon, describe
from tests.wire.dealing import hit_rate, recorded


def test_eight_clients_hit_what_one_would(tmp_path):
    requests, gib = recorded(700, 0.5)
    rates = []
    for count in (1, 8):
        folder = tmp_path / str(count)
        folder.mkdir()
        with Daemon(folder, "--arena-mode", "shared-rw", size=f"{gib:.6f}") as daemon:
            clients = [daemon.client(timeout=10) for _ in range(count)]
            rates.append(hit_rate(clients, requests))
            assert describe(clients[0])["memory"]["reserved"] == 0
            for client in clients:
                client.close()
    assert rates[0] > 0.1, rates
    assert abs(rates[0] - rates[1]) <= 0.01, rates
