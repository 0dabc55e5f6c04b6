"""Imports of contact events: what a row means, what a file is, and that nothing is lost or counted twice."""

import contextlib
import csv
import gzip
import io
import json
import signal
import subprocess
import threading
from datetime import UTC, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from afluente import postgres as connections
from afluente.cli.contact_events import import_
from afluente.errors import Refused
from producers.contact_event_import import Format, Options, Source, imports, run, write_rejected
from producers.contact_event_import import reading as reading_module
from producers.contact_event_import.rows import FIELDS, Judge, Rejected, parsed
from tests.fixtures.postgres import clone

PHONE = "+5511987654321"


# -------------------- a row


@pytest.fixture(scope="module")
def judge():
    return Judge(
        source="erp",
        timezone=ZoneInfo("America/Sao_Paulo"),
        country="BR",
        name_of_row=lambda line: f"imported:x:{line}",
    )


def judged(judge, **row):
    return dict(zip(FIELDS, judge.item(7, 42, {"phone": "11 8765-4321", "metric": "Order Placed"} | row), strict=True))


def test_row_is_typed_and_canonical(judge):
    item = judged(
        judge, email=" Ana@Example.com ", value="297.90", occurred_at="2026-11-20 10:00", properties={"a": 2**63}
    )
    assert (item["n"], item["phone"], item["phone_as_received"]) == (7, PHONE, "11 8765-4321")
    assert (item["email"], item["source"], item["external_event_id"]) == ("ana@example.com", "erp", "imported:x:42")
    assert item["occurred_at"].astimezone(UTC) == datetime(2026, 11, 20, 13, tzinfo=UTC)
    assert json.loads(item["properties"]) == {"a": 2**63}
    named = judged(judge, external_event_id="order_placed:1", source="shop", phone=PHONE)
    assert (named["external_event_id"], named["source"], named["phone_as_received"]) == ("order_placed:1", "shop", None)
    assert judged(judge, value=10)["value"] == "10"
    assert judged(judge, value=0.1)["value"] == "0.1"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"phone": None}, "names no contact"),
        ({"phone": "123"}, "phone cannot be read as one$"),
        ({"email": "nobody"}, "email cannot be read as one$"),
        ({"contact_id": "x"}, "contact_id is not a UUID$"),
        ({"metric": None}, "neither event_type nor metric"),
        ({"event_type": "purchase_complete"}, "did you mean purchase_completed"),
        ({"event_type": "loyalty_earned"}, "a fact of your own is a metric"),
        ({"source": "x" * 101}, "source has 101 characters"),
        ({"source_type": "OTHER"}, "source_type must be one of"),
        ({"value": "10,50"}, "is not an amount such as 297.90"),
        ({"value": float("inf")}, "is not an amount"),
        ({"value": 10**400}, "is not an amount"),
        ({"value": True}, "is not an amount"),
        ({"currency": "real"}, "is not one such as BRL"),
        ({"occurred_at": "20/11/2026"}, "is not ISO 8601"),
        ({"occurred_at": 5}, "is not ISO 8601"),
        ({"occurred_at": "9999-12-31T23:59:59-12:00"}, "does not lie between 1970 and 2200"),
        ({"occurred_at": "0001-01-01T00:00:00+14:00"}, "does not lie between"),
        ({"properties": []}, "properties must be a JSON object"),
        ({"event_type": "purchase_completed", "properties": {"amount": "a lot"}}, "properties.amount"),
        ({"metric": "Order Paid", "properties": {"amount": "a lot"}}, "properties.amount"),
        ({"properties": {"a": "\ud800"}}, "properties cannot be kept"),
        ({"fone": "1"}, "unknown field 'fone'"),
        ({"entity_id": 5}, "entity_id must be text, not int"),
    ],
)
def test_row_that_cannot_be_recorded_says_why(judge, row, reason):
    with pytest.raises(Rejected, match=reason):
        judged(judge, **row)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, "metric", "_x", "y"]), JSON, max_size=6), st.text(max_size=40))
def test_whatever_a_row_holds_it_is_an_item_or_rejected(judge, row, junk):
    with contextlib.suppress(Rejected):
        assert len(judge.item(0, 1, row)) == len(FIELDS)
    with pytest.raises(Rejected):
        parsed(junk.encode("utf-8", "surrogatepass") + b"]")
    with pytest.raises(Rejected):
        parsed(b'{"a": NaN, "b": 1234567890123456789012}')


# -------------------- a file


def source(content, name="facts.csv", format=None):
    return Source(io.BytesIO(content.encode() if isinstance(content, str) else content), name, format)


def test_csv_has_lines_delimiters_quotes_and_typed_properties():
    text = (
        "\ufeffphone;event_type;properties;properties.confidence;properties.productIds;_note\r\n"
        f'{PHONE};interest_detected;"{{""category"": ""café""}}";0.5;;x\r\n'
        f'{PHONE};product_asked;"{{""question"":\n""two lines""}}";;;\r\n'
        "\r\n"
        f'{PHONE};purchase_abandoned;;;"[""1"", ""2""]";\r\n'
        "too;few\r\n"
        f"{PHONE};interest_detected;;much;;"
    )
    read = source(text)
    assert (read.format, read.lines) == (Format.csv, 8)
    rows = list(read)
    assert [row.line for row in rows] == [2, 3, 6, 7, 8]
    assert rows[0].content["properties"] == {"category": "café", "confidence": 0.5}
    assert rows[1].content["properties"] == {"question": "two lines"}
    assert rows[2].content["properties"] == {"productIds": ["1", "2"]}
    assert [row.content.reason for row in rows[3:]] == [
        "has 2 cells, the header 6",
        "properties.confidence 'much' is not of its type",
    ]
    assert [row.line for row in read] == [2, 3, 6, 7, 8]  # again, from the beginning


def test_column_nobody_knows_is_a_reason_not_to_begin():
    with pytest.raises(Refused, match="unknown column 'fone'"):
        source("fone,metric\n1,x\n").header()
    with pytest.raises(Refused, match="twice"):
        source("phone,phone\n1,x\n").header()
    assert list(source("")) == []


@pytest.mark.parametrize("zipped", [False, True])
def test_ndjson_is_known_by_name_or_first_byte_zipped_or_not(zipped):
    content = b'{"phone": "1", "metric": null, "name": ""}\n\n[1]\n{"a": 123456789012345678901}\nx\n{"a": "\\u0000"}\n'
    content = gzip.compress(content) if zipped else content
    for name in ("x.ndjson", "x.jsonl.gz", "stdin"):
        rows = list(source(content, name))
        assert [row.line for row in rows] == [1, 3, 4, 5, 6]
        assert rows[0].content == {"phone": "1"}
        assert rows[2].content == {"a": 123456789012345678901}
        assert all(isinstance(rows[n].content, Rejected) for n in (1, 3, 4))


def test_bytes_that_are_no_text_and_endless_lines_are_one_rows_fault(monkeypatch):
    rows = list(source(b"phone,metric\n1,a\n2,\xff\n3,\x00\n4,b\n"))
    assert [isinstance(row.content, Rejected) for row in rows] == [False, True, True, False]
    monkeypatch.setattr(reading_module, "MAX_LINE_BYTES", 64)
    rows = list(source(b'{"a": "' + b"x" * 3000 + b'"}\n{"a": 1}\n', "x.ndjson"))
    assert [(row.line, isinstance(row.content, Rejected)) for row in rows] == [(1, True), (2, False)]
    rows = list(source(b'phone,metric\n1,"' + b"x" * 3000 + b"\n2,b\n3,c\n"))
    assert isinstance(rows[0].content, Rejected)  # a quote that never ends


def test_row_of_lines_without_end_is_bounded(monkeypatch):
    monkeypatch.setattr(reading_module, "MAX_LINE_BYTES", 1024)
    # each cell ends its line inside of quotes: to the format all of this is one row
    read = source(gzip.compress(b"phone,metric\n" + b'"x\n",' * 5_000), "x.csv.gz")
    rows = list(read)
    assert rows[0].content.reason.startswith("not CSV: a row")
    assert max(len(row.raw) for row in rows) < 1024


def test_cut_off_gzip_is_refused():
    with pytest.raises(Refused, match="cut off"):
        source(gzip.compress(b"phone,metric\n" * 1000)[:-10], "x.csv.gz")
    zipped = gzip.compress(b"phone,metric\n" * 1000)
    with pytest.raises(Refused, match="not gzip"):
        source(zipped[:12] + b"\xff" * 40 + zipped[52:], "x.csv.gz")


# -------------------- an import


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all: every test has an organization of its own in it."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def organization(database):
    return database.organization("Loja Azul")


def make_contact(database, organization, phone):
    with connections.connect(database.url) as conn:
        return conn.execute(
            "SELECT contact_id FROM upsert_contact(%s, %s, 'Ana', 'test')",
            [organization, Jsonb([{"kind": "phone", "value": phone}])],
        ).fetchone()[0]


@pytest.fixture
def contact(database, organization):
    return make_contact(database, organization, PHONE)


def imported(database, organization, content, **options):
    read = source(content, "facts.csv" if not content.lstrip().startswith("{") else "facts.ndjson")
    given = {"source": "erp", "batch_rows": 4} | options
    return run(database.url, organization, read, Options(**given))


def summary(result):
    return result.recorded, result.duplicates, result.failed, result.contacts_created


def stored(database, organization):
    return database.execute(
        "SELECT external_event_id, contact_id, value, occurred_at, metric_name FROM contact_events"
        " WHERE organization_id = %s AND metric_name <> 'Contact Created' ORDER BY external_event_id",
        [organization],
    )


def lines(*rows):
    return "phone,metric,external_event_id,value,occurred_at\n" + "".join(f"{row}\n" for row in rows)


def fact(number, phone=PHONE):
    return f"{phone},Order Placed,order_placed:{number:03},1.50,2026-11-20T10:00:00-03:00"


def test_every_row_is_recorded_once_with_its_event(database, organization, contact):
    text = lines(*(fact(n) for n in range(10)), fact(3))
    assert summary(imported(database, organization, text)) == (10, 1, 0, 0)
    assert [row[0] for row in stored(database, organization)] == [f"order_placed:{n:03}" for n in range(10)]
    assert stored(database, organization)[0][1:] == (
        contact, Decimal("1.50"), datetime(2026, 11, 20, 13, tzinfo=UTC), "Order Placed",
    )  # fmt: skip
    ((events, sources),) = database.execute(
        "SELECT count(*), array_agg(DISTINCT (metadata ->> 'source', metadata ->> 'automations')::text) FROM event_log"
        " WHERE organization_id = %s AND event_type = 'contact_event.recorded'",
        [organization],
    )
    assert (events, sources) == (10, ["(import,no)"])
    ((details,),) = database.execute(
        "SELECT details FROM audit_logs WHERE organization_id = %s AND action = 'contact_event.imported'",
        [organization],
    )
    assert details["recorded"] == 10
    # the same bytes again: nothing to do, unless asked to, and then nothing twice
    again = imported(database, organization, text)
    assert again.finished_before
    assert summary(again) == (10, 1, 0, 0)
    assert summary(imported(database, organization, text, again=True)) == (0, 11, 0, 0)
    assert summary(imported(database, organization, text + fact(11) + "\n", automations=True)) == (1, 11, 0, 0)
    assert database.execute("SELECT count(*) FROM event_log WHERE NOT metadata ? 'automations'") == [(1,)]
    for more in ({}, {"again": True}):
        with pytest.raises(Refused, match="with --source erp: with another one its facts would count twice"):
            imported(database, organization, text, source="shop", **more)


def test_rows_without_names_are_named_by_the_file(database, organization, contact):
    text = lines(*[f"{PHONE},Loyalty,,,"] * 9)
    assert summary(imported(database, organization, text)) == (9, 0, 0, 0)
    assert summary(imported(database, organization, text, again=True)) == (0, 9, 0, 0)
    assert len(stored(database, organization)) == 9
    assert stored(database, organization)[0][0].startswith("imported:")


def test_rejected_rows_are_listed_by_line_and_can_be_mended(database, organization, contact, tmp_path):
    text = lines(fact(1), "x,Order Placed,a,,", fact(2, "+5511900000001"), fact(3), f"{PHONE},Order Placed,b,1e5,")
    read = source(text)
    result = run(database.url, organization, read, Options(source="erp", batch_rows=2))
    assert summary(result) == (2, 0, 3, 0)
    assert [line for line, _ in result.errors] == [3, 4, 6]
    assert "no contact of the organization" in result.errors[1][1]
    path = tmp_path / "rejected.csv"
    with connections.connect(database.url) as conn:
        assert write_rejected(conn, result, organization, read, path) == 3
    assert path.stat().st_mode & 0o077 == 0  # people's phones
    rejected = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [(row["_line"], row["phone"]) for row in rejected] == [("3", "x"), ("4", "+5511900000001"), ("6", PHONE)]
    assert all(row["_reason"] for row in rejected)
    mended = path.read_text().replace("x,Order", f"{PHONE},Order").replace("1e5", "100000")
    assert summary(imported(database, organization, mended, create_contacts=True)) == (3, 0, 0, 1)
    assert len(stored(database, organization)) == 5


def test_json_rows_are_rejected_as_they_stand(database, organization, contact, tmp_path):
    text = (
        '{"phone": "' + PHONE + '", "metric": "m", "properties": {"n": [1]}}\n{"phone": "x", "metric": "m"}\nnot json\n'
    )
    read = source(text, "x.ndjson")
    result = run(database.url, organization, read, Options(source="erp"))
    assert summary(result) == (1, 0, 2, 0)
    path = tmp_path / "rejected.ndjson"
    with connections.connect(database.url) as conn:
        write_rejected(conn, result, organization, read, path)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["_line"], first["phone"], first["metric"]) == (2, "x", "m")
    assert (second["_line"], second["_text"]) == (3, "not json")


def test_dry_run_says_the_same_and_leaves_nothing(database, organization, contact):
    text = lines(fact(1), fact(2, "+5511900000001"), "x,y,z,,", fact(4), fact(5), fact(6))
    tried = imported(database, organization, text, dry_run=True, create_contacts=True)
    for table, rows in (("contact_event_import", 0), ("contacts", 1), ("event_log", 0)):
        assert database.execute(f"SELECT count(*) FROM {table} WHERE organization_id = %s", [organization]) == [(rows,)]
    assert stored(database, organization) == []
    done = imported(database, organization, text, create_contacts=True)
    assert summary(tried) == summary(done) == (5, 0, 1, 1)
    assert tried.errors == done.errors


def test_people_are_found_by_every_name_and_made_once(database, organization, contact):
    text = "contact_id,phone,email,contact_external_id,contact_source,name,metric,external_event_id\n"
    text += f"{contact},,,,,,m,1\n,11 8765-4321,,,,,m,2\n,,new@x.br,,,Bia,m,3\n,,New@X.br,,,,m,4\n"
    text += ",,,77,,,m,5\n,,,77,erp,,m,6\n,+55 62 98003-0003,late@x.br,,,Caio,m,7\n,,late@x.br,,,,m,8\n"
    assert summary(imported(database, organization, text, create_contacts=True, batch_rows=3)) == (8, 0, 0, 3)
    people = [row[1] for row in stored(database, organization)]
    assert people[0] == people[1] == contact
    assert people[2] == people[3]
    assert people[4] == people[5]
    assert people[6] == people[7]
    assert len(set(people)) == 4
    created = "SELECT count(*) FROM event_log WHERE organization_id = %s AND event_type = 'contact.created'"
    assert database.execute(created, [organization]) == [(3,)]


@pytest.mark.parametrize("batch_rows", [1, 10])
def test_known_person_is_known_by_what_else_names_it_from_then_on(database, organization, contact, batch_rows):
    text = "phone,email,contact_external_id,name,metric,external_event_id\n"
    text += "11 8765-4321,ana@x.br,,,m,1\n,ana@x.br,77,,m,2\n,,77,Ana B,m,3\n"
    assert summary(imported(database, organization, text, create_contacts=True, batch_rows=batch_rows, lanes=1)) == (
        3, 0, 0, 0,
    )  # fmt: skip
    assert {row[1] for row in stored(database, organization)} == {contact}
    assert database.execute("SELECT email, name FROM contacts WHERE id = %s", [contact]) == [("ana@x.br", "Ana")]


def test_file_of_one_organization_never_touches_another(database, organization, contact):
    theirs = database.organization("Theirs")
    foreign = make_contact(database, theirs, "+5511955550000")
    text = f"contact_id,phone,metric\n{foreign},,m\n,+5511955550000,m\n{contact},,m\n"
    result = imported(database, organization, text)
    assert summary(result) == (1, 0, 2, 0)
    assert summary(imported(database, organization, text + "\n", create_contacts=True)) == (2, 0, 1, 1)
    assert stored(database, theirs) == []
    owned = "SELECT DISTINCT organization_id FROM contact_event_import_batch"
    with connections.connect(database.url) as conn, conn.transaction(), connections.act_for_sync(conn, theirs):
        assert conn.execute(owned).fetchall() == []


def test_row_that_only_postgres_refuses_costs_nobody_else_anything(database, organization, contact):
    """Found by halving: an integration that is not there."""
    good = {"phone": PHONE, "metric": "m"}
    bad = {**good, "integration_id": "00000000-0000-0000-0000-000000000001"}
    rows = [good, good, bad, good, good, good, bad]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    result = imported(database, organization, text, batch_rows=6)
    assert summary(result) == (5, 0, 2, 0)
    assert [line for line, _ in result.errors] == [3, 7]
    assert "integration" in result.errors[0][1]


def test_generated_rows_that_pass_here_pass_in_postgres(database, organization, contact):
    """What the judge takes, the table takes: a few hundred odd rows in one file."""
    rows = []

    @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.fixed_dictionaries(
            {"phone": st.just(PHONE), "metric": st.sampled_from(["Order Placed", "Loyalty", "Order Paid"])},
            optional={
                "properties": st.dictionaries(st.text(max_size=8), JSON, max_size=3),
                "value": st.decimals(allow_nan=False, allow_infinity=False).map(str) | st.integers(),
                "external_event_id": st.text(min_size=1, max_size=20),
                "occurred_at": st.datetimes(datetime(1960, 1, 1), datetime(2210, 1, 1)).map(datetime.isoformat),
                "entity_id": st.text(min_size=1, max_size=20),
            },
        )
    )
    def collect(row):
        rows.append(row)

    collect()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    result = run(database.url, organization, source(text, "x.ndjson"), Options(source="erp"), max_errors=1000)
    assert result.recorded + result.duplicates + result.failed == len(rows)
    assert result.recorded > 20
    mine = ("amount", "does not lie", "NUL", "not JSON", "properties", "names no contact", "UTF-8")
    assert [reason for _, reason in result.errors if not any(word in reason for word in mine)] == []


# -------------------- killed, interrupted, run twice

FACTS = 200


@pytest.fixture
def command(processes, database, tmp_path):
    """Import a file of twenty-one batches into an organization of its own."""
    path = tmp_path / "facts.csv"
    path.write_text(lines(*(fact(n) for n in range(FACTS)), "x,y,z,,"))
    organization = database.organization(f"Loja {path}")
    make_contact(database, organization, PHONE)
    arguments = ("contact-events", "import", path, "--org", organization, "--source", "erp", "--batch-rows", 10)

    def command(*more, start=False, **faults):
        run = processes.start if start else processes.run
        return run(*map(str, (*arguments, *more)), "--format", "json", env={"DATABASE_URL": database.url} | faults)

    command.organization = organization  # type: ignore[attr-defined]
    command.path = path  # type: ignore[attr-defined]
    return command


def test_killed_import_goes_on_and_counts_everything_once(command, database, tmp_path):
    hits = tmp_path / "hits"
    before = 0
    for point, count in (("import.before_commit", 4), ("import.after_commit", 3)):
        killed = command(AFLUENTE_FAULT=f"{point}:{count}", AFLUENTE_FAULT_LOG=str(hits))
        assert killed.returncode == -signal.SIGKILL
        assert hits.read_text().count(point) >= count
        recorded = len(stored(database, command.organization))
        assert before < recorded < FACTS
        before = recorded
    with connections.connect(database.url) as conn, conn.transaction():
        (row,) = imports(conn, command.organization, 10)
    assert (row["file_name"], row["recorded"], row["finished_at"]) == ("facts.csv", before, None)
    assert row["last_line"] > 0
    done = command()
    assert done.returncode == 5, done.stderr
    result = json.loads(done.stdout)
    assert (result["rows"], result["recorded"], result["duplicates"], result["failed"]) == (FACTS + 1, FACTS, 0, 1)
    assert "went on where an earlier run had ended" in done.stderr
    assert [error["line"] for error in result["errors"]] == [FACTS + 2]
    assert result["rejected_file"] == f"{command.path}.rejected.csv"
    assert len(stored(database, command.organization)) == FACTS
    events = "SELECT count(*), count(DISTINCT payload ->> 'contact_event_id') FROM event_log"
    events += " WHERE organization_id = %s AND event_type = 'contact_event.recorded'"
    assert database.execute(events, [command.organization]) == [(FACTS, FACTS)]


def test_interrupted_import_says_how_to_go_on(command, database):
    process = command(
        "--lanes", 1, "--batch-rows", 1, start=True, AFLUENTE_FAULT="import.after_commit:1:STOP"
    )  # so many batches are left that it hears the signal before it is through
    while not stopped(process.pid):  # by itself, after its first batch
        threading.Event().wait(0.01)
    process.signal(signal.SIGINT)
    process.signal(signal.SIGCONT)
    assert process.wait(20) == 130
    assert "goes on from there" in process.log
    assert 0 < len(stored(database, command.organization)) < FACTS
    # two at once share what is left
    other = command(start=True)
    done = command()
    assert (done.returncode, other.wait(30)) in ((5, 5), (5, 3), (3, 5))
    assert len(stored(database, command.organization)) == FACTS


def stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


def test_standard_input_is_imported_and_goes_on_too(database, processes, contact, organization, tmp_path):
    text = gzip.compress("".join(f'{{"phone": "{PHONE}", "metric": "m", "value": {n}}}\n' for n in range(30)).encode())
    from afluente.local.processes import COMMAND

    def piped(*more):
        return subprocess.run(
            [COMMAND, "contact-events", "import", "-", "--org", str(organization), *more, "--format", "json"],
            input=text,
            capture_output=True,
            env=processes.env | {"DATABASE_URL": database.url},
            cwd=tmp_path,
            timeout=60,
        )

    done = piped()
    assert done.returncode == 1  # no source
    assert b"--source" in done.stderr
    assert (tmp_path / "stdin.rejected.ndjson").exists()
    done = piped("--source", "erp", "--again")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recorded"] == 30


def test_example_of_the_help_is_imported(database, organization):
    text = import_.__doc__.partition("Example: facts.csv\n")[2].partition("\b")[0]
    text = "".join(f"{line.strip()}\n" for line in text.strip().splitlines())
    assert summary(imported(database, organization, text, create_contacts=True)) == (2, 0, 0, 2)
    (loyalty, paid) = stored(database, organization)
    assert (loyalty[0], loyalty[3]) == ("loyalty:77", datetime(2026, 11, 21, 12, 30, tzinfo=UTC))
    assert (paid[0], paid[2], paid[4]) == ("order_paid:1001", Decimal("297.90"), "Order Paid")
