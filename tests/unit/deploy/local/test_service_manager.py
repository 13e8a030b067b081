"""The messages to systemd from a deployment that serves and stops."""

from deploy.commands.serve import ServiceManager


def test_service_manager_is_notified_of_start_and_stop():
    sent = []
    environment = {"NOTIFY_SOCKET": "/run/notify", "HOME": "/"}
    manager = ServiceManager(environment, lambda *datagram: sent.append(datagram))
    assert environment == {"HOME": "/"}  # children do not inherit it
    manager.serving("http://127.0.0.1:8000")
    manager.stopping()
    assert sent == [
        ("/run/notify", b"READY=1\nSTATUS=serving at http://127.0.0.1:8000"),
        ("/run/notify", b"STOPPING=1\nSTATUS=letting answers end"),
    ]


def test_without_a_service_manager_nothing_is_sent():
    sent = []
    ServiceManager({}, lambda *datagram: sent.append(datagram)).serving("http://127.0.0.1:8000")
    assert not sent


def test_service_manager_that_is_gone_is_logged(caplog):
    def refuse(address: str, message: bytes) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    ServiceManager({"NOTIFY_SOCKET": "/gone"}, refuse).stopping()
    assert "cannot be told 'STOPPING=1" in caplog.text
