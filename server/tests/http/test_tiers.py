"""Lower tiers follow the configuration that is read again; what stays as it was is not touched."""

import pytest

from server.tests.http.running import answered, lmcache
from tests.wire.daemons import Daemon, describe, key, store, wait_for


class Written:
    """A daemon, its configuration, and a client."""

    def __init__(self, folder, daemon, client, file):
        self.folder, self.daemon, self.client, self.file = folder, daemon, client, file

    def disk(self, name, folder=None, size="64MiB"):
        path = self.folder / (folder or name)
        return f"- disk: {{name: {name}, path: '{path}', size: {size}}}\n"

    def write(self, *tiers, first="- cpu: {size: 64MiB}\n", more=""):
        self.file.write_text("tiers:\n" + first + "".join(tiers) + more)

    def reload(self, *tiers, **how):
        """Exit status, and what was said."""
        self.write(*tiers, **how)
        done = lmcache(self.daemon, "reload")
        return done.returncode, done.stderr

    @property
    def tiers(self):
        return {each["name"]: each["enabled"] for each in answered(self.daemon, "tiers", "list")}

    def kept(self, tier):
        """Bytes that a tier has once all is written."""
        answered(self.daemon, "flush")
        return next(
            each["bytes"] for each in describe(self.client)["tiers"] if each["name"] == tier
        )


@pytest.fixture
def written(tmp_path):
    file = tmp_path / "kv.yaml"
    made = Written(tmp_path, None, None, file)
    made.write(made.disk("one"))
    with Daemon(tmp_path, "--config", str(file)) as made.daemon:
        made.client = made.daemon.client()
        yield made
        made.client.close()


def test_tiers_come_change_and_go_and_the_others_are_not_touched(written):
    assert store(written.client, 1, 2) == [True, True]
    before = written.kept("one")
    assert written.reload(written.disk("two"), written.disk("one")) == (0, "")
    assert list(written.tiers) == ["two", "one"]
    assert store(written.client, 3) == [True]
    assert 0 < written.kept("two") < before < written.kept("one")
    # Another folder is another beginning of that tier alone.
    kept = written.kept("one")
    assert written.reload(written.disk("two", "elsewhere"), written.disk("one")) == (0, "")
    assert written.kept("two") == 0
    assert written.kept("one") == kept
    assert written.reload(written.disk("two"), written.disk("one")) == (0, "")
    wait_for(lambda: written.kept("two") > 0, what="what the folder has kept")
    assert written.reload(written.disk("two")) == (0, "")
    assert written.tiers == {"two": True}
    assert describe(written.client)["memory"]["values"] == 3
    assert written.reload() == (0, "")
    assert written.tiers == {}


def test_values_of_a_tier_that_came_are_found(written):
    store(written.client, 1)
    written.kept("one")
    assert written.reload() == (0, "")
    answered(written.daemon, "clear", "--tier", "cpu")
    assert written.reload(written.disk("one")) == (0, "")
    wait_for(lambda: written.kept("one") > 0, what="the tier's own index")
    assert answered(written.daemon, "query", key(1).text)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"first": "- cpu: {size: 32MiB}\n"}, "the tier in memory"),
        ({"more": "chunk_size: 32\n"}, "chunk_size"),
        ({"more": "manager: {close_timeout: 9}\n"}, "manager"),
    ],
)
def test_what_needs_a_restart_says_so_and_no_tier_changes(written, how, named):
    status, said = written.reload(written.disk("two"), **how)
    assert status == 2
    assert f"a restart is needed for {named}\n" in said
    assert written.tiers == {"one": True}


def test_tier_that_cannot_be_leaves_the_others_and_is_tried_again(written):
    (written.folder / "two").write_text("in the way")
    status, said = written.reload(written.disk("two"), written.disk("three"), written.disk("one"))
    assert status == 2
    assert "all but the tiers" in said
    assert list(written.tiers) == ["three", "one"]
    (written.folder / "two").unlink()
    assert written.reload(written.disk("two"), written.disk("three"), written.disk("one")) == (
        0,
        "",
    )
    assert list(written.tiers) == ["two", "three", "one"]


def test_tier_that_cannot_change_serves_on_as_it_was(written):
    store(written.client, 1)
    kept = written.kept("one")
    (written.folder / "bad").write_text("in the way")
    assert written.reload(written.disk("one", "bad"))[0] == 2
    assert written.tiers == {"one": True}
    wait_for(lambda: written.kept("one") == kept, what="its own index")


def test_tier_that_was_disabled_stays_so_and_comes_back_as_it_is_written_now(written):
    answered(written.daemon, "tiers", "disable", "one")
    assert written.reload(written.disk("one", "elsewhere")) == (0, "")
    assert written.tiers == {"one": False}
    answered(written.daemon, "tiers", "enable", "one")
    assert written.tiers == {"one": True}
    store(written.client, 1)
    assert written.kept("one") > 0
    assert any((written.folder / "elsewhere").rglob("*"))
    assert written.reload(written.disk("one"), written.disk("one"))[0] == 2
