"""Letters whole, for somebody else to look at."""

import base64
import json
import stat

import schemas
from afluente import kafka as clients
from tests.consumers.runtime.support import produce_raw


def test_letters_are_written_whole_and_that_they_were_is_written_down(
    database, topics, here, bury, bury_bytes, tmp_path
):
    topics.create(topics.dead_letter("mended-worker"), topics.relay_dead_letter, partitions=1)
    organization = database.organization()
    event_id, gone = bury(organization, payload={"name": "Maria"}), bury(organization)
    database.execute(f"SET afluente.rewrite = 'erasure'; DELETE FROM event_log WHERE id = '{gone}'")
    producer = clients.producer(topics.settings)
    produce_raw(producer, topics.dead_letter("mended-worker"), b"\xff\x00", key=b"k", headers=[("x", b"\xfe")])
    produce_raw(producer, topics.relay_dead_letter, b"{")
    producer.flush(30)
    bury_bytes(7)
    file = tmp_path / "letters.ndjson"
    arguments = ["export", "--worker", "mended-worker", "--output", file, "--reason", "bug 812"]
    ran = here(*arguments)
    assert (ran.status, ran.data["count"]) == (5, 3)
    assert [failure["id"] for failure in ran.data["failed"]] == [f"mended-worker:{gone}"]
    assert "personal data" in ran.words
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = {line["id"]: line for line in map(json.loads, file.read_text().splitlines())}
    whole = lines[f"mended-worker:{event_id}"]
    assert whole["event"]["payload"] == {"name": "Maria"}
    assert schemas.decode(base64.b64decode(whole["value_base64"])).id == event_id
    assert (whole["attempts"], whole["error"], whole["organization_id"]) == (8, "b is broken", str(organization))
    bytes_ = lines["mended-worker@t/0/7"]
    assert (bytes_["event"], base64.b64decode(bytes_["value_base64"])) == (None, b"\xff\x00")
    assert bytes_["headers"] == [["x", base64.b64encode(b"\xfe").decode()]]
    assert lines[f"mended-worker:{gone}"]["value_base64"] is None
    audited = database.execute("SELECT action, entity_id, details ->> 'reason' FROM audit_logs")
    assert sorted(audited) == sorted(("dead_letter.exported", str(id), "bug 812") for id in (event_id, gone))
    assert database.execute("SELECT record_offset, action FROM undecodable_audit") == [(7, "dead_letter.exported")]
    shown = here("show", "mended-worker@t/0/7").data
    assert [(entry["action"], entry["details"]["reason"]) for entry in shown["history"]] == [
        ("dead_letter.exported", "bug 812")
    ]
    assert shown["record"] == {"topic": topics.dead_letter("mended-worker"), "partition": 0, "offset": 0}
    # not over a file that is there, and none that is empty
    assert here(*arguments).status == 2
    assert len(file.read_text().splitlines()) == 3
    nothing = tmp_path / "nothing"
    assert here("export", "--worker", "no-such-worker", "--output", nothing, "--reason", "x").status == 3
    assert not nothing.exists()
    relays = tmp_path / "relay"
    assert here("export", "--relay", "--all", "--output", relays, "--reason", "x").status == 0
    assert base64.b64decode(json.loads(relays.read_text())["value_base64"]) == b"{"


def test_on_stdout_there_are_the_letters_only(database, bury, processes):
    event_id = bury(database.organization())
    ran = processes.run("dlq", "export", "--all", "--reason", "x")
    assert (ran.returncode, ran.stderr) == (0, "1 dead letters written; they hold personal data\n")
    assert json.loads(ran.stdout)["event"]["id"] == str(event_id), ran.stdout
