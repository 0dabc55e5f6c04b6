"""Runs on the real database: what starts them, what their steps do and record, and that none of it happens twice."""

from datetime import timedelta

import pytest

from afluente import faults
from consumers.automations import guard
from tests.consumers.automations.playing import Play
from tests.fixtures.postgres import clone


@pytest.fixture(scope="module")
def database(postgres, template):
    """One for all tests of this file: each has an organization of its own."""
    with clone(postgres, template) as database:
        yield database


@pytest.fixture
def play(database):
    return Play(database)


FIRST_NAME, LINK = "{{ contact.first_name }}", "{{ link: https://loja.example/o }}"
ADD_VIP = {"type": "add_tag", "tag": "vip"}


async def test_every_step_does_its_deed_and_is_recorded_with_its_run(play):
    play.channel()
    contact = play.contact(tags=["novo"])
    play.execute(
        "INSERT INTO templates (organization_id, name, status, components) VALUES (%s, 'obrigado', 'approved', %s)",
        play.organization,
        '[{"type": "BODY", "text": "Obrigado, {{1}}! {{2}}"}]',
    )
    automation = play.automation(
        "order_paid",
        ADD_VIP,
        {"type": "remove_tag", "tag": "novo"},
        {"type": "send_message", "body": "Oi {{ contact.first_name }}, {{ event.value }}: " + LINK},
        {"type": "send_template", "template": "obrigado", "parameters": [FIRST_NAME, "{{ event.properties.note }}"]},
        {"type": "ai_respond", "instructions": "Agradeça a {{ contact.name }}"},
        {"type": "add_tag", "tag": "nunca", "when": {"field": "contact.tags", "op": "not_contains", "value": "vip"}},
        {"type": "close_conversation"},
        conditions={"field": "event.value", "op": "gte", "value": 100},
    )  # fmt: skip
    play.record(contact, value="297.90", fact="order_paid:1", properties={"note": "{{1}}"})
    play.record(contact, value="99.99", fact="order_paid:2")
    await play.work()
    [run] = play.runs(automation)
    assert (run["state"], run["version"], run["contact_id"]) == ("done", 1, contact)
    assert [step["state"] for step in run["steps"]] == ["done"] * 5 + ["skipped", "done"]
    assert play.tags(contact) == ["vip"]

    # the messages wait to be sent, and say whose they are
    text, template = play.rows(
        "SELECT id, body, status, metadata, message_type FROM messages ORDER BY message_type DESC"
    )
    [(token, url, linked, clicked)] = play.rows("SELECT token, url, message_id, clicks FROM tracked_links")
    assert (url, linked, clicked) == ("https://loja.example/o", text[0], 0)
    assert text[1:3] == (f"Oi Ana, 297.90: https://l.example/l/{token}", "queued")
    assert template[1:3] == ("Obrigado, Ana! {{1}}", "queued")  # what is filled in is not looked at again
    assert text[3]["automation_run"] == str(run["id"])
    assert template[3]["template"]["parameters"] == ["Ana", "{{1}}"]
    queued = play.events("message.queued")
    assert [event.entity_id for event in queued] == [text[0], template[0]]
    assert {event.payload["body"] for event in queued} == {text[1], template[1]}
    [asked] = play.events("ai.response_requested")
    assert asked.payload["instructions"] == "Agradeça a Ana Souza"

    # facts that happened at once are recorded, with their run; those of messages are not yet
    facts = play.facts()
    assert [metric for metric, _ in facts] == ["Tag Added", "Tag Removed", "Conversation Opened", "Conversation Closed"]
    assert {properties["automation_execution_id"] for _, properties in facts} == {str(run["id"])}
    [trigger] = [event for event in play.events("contact_event.recorded") if event.payload["value"] == "297.90"]
    own = [event for event in play.events() if event.metadata.get("automation_run")]
    assert {event.metadata["automation_run"] for event in own} == {str(run["id"])}
    assert {(event.metadata["causation_id"], event.metadata["causation_depth"]) for event in own} == {
        (str(trigger.id), 1)
    }

    # their outcomes come
    for message, metadata in ((text, {}), (template, {})):
        play.emit(
            "message.sent", "message", message[0],
            {"direction": "out", "conversation_id": "c", "contact_id": str(contact), "channel": "whatsapp",
             "body": message[1], "message_id": str(message[0]), "waha_message_id": f"wamid.{message[4]}"},
            metadata,
        )  # fmt: skip
    play.emit(
        "ai.responded", "conversation", asked.entity_id,
        {"conversation_id": str(asked.entity_id), "message_id": "m-3", "model": "m", "tokens_in": 1, "tokens_out": 1,
         "cost_cents": 0.1, "latency_ms": 5},
        {"causation_id": str(asked.id), "causation_depth": 2},
    )  # fmt: skip
    await play.work()
    sent = dict(play.facts()[4:])
    assert list(sent) == ["Message Sent", "Template Sent", "AI Response Sent"]
    assert sent["Message Sent"] | {"automation_id": 0} == {
        "phone": "+5511987654321",
        "wa_message_id": "wamid.text",
        "message_id": str(text[0]),
        "conversation_id": "c",
        "automation_execution_id": str(run["id"]),
        "automation_id": 0,
    }
    assert [step["outcome"] for step in play.runs(automation)[0]["steps"]] == [
        None, None, "sent", "sent", "sent", None, None,
    ]  # fmt: skip

    # and again, all of it: nothing changes
    before = len(play.events())
    for event in play.events():
        if event.event_type in play.workers[0].event_types:
            await play.again(event.id)
    assert len(play.events()) == before
    assert len(play.runs()) == 1


async def test_a_failed_message_is_noted_and_a_later_success_is_the_last_word(play):
    play.channel()
    contact = play.contact()
    automation = play.automation("order_paid", {"type": "send_message", "body": "oi"})
    play.record(contact, fact="order_paid:1")
    await play.work()
    [message] = [event.entity_id for event in play.events("message.queued")]
    failed = {"message_id": str(message), "error_code": "131026", "error_message": "no such number", "retryable": True}
    sent = {"direction": "out", "conversation_id": "c", "contact_id": str(contact), "channel": "whatsapp", "body": "oi",
            "message_id": str(message)}  # fmt: skip
    seen = []
    for event_type, payload in (("message.failed", failed), ("message.sent", sent), ("message.failed", failed)):
        play.emit(event_type, "message", message, payload)
        await play.work()
        seen.append(play.runs(automation)[0]["steps"][0]["outcome"])
    assert seen == ["failed", "sent", "sent"]
    assert [metric for metric, _ in play.facts() if metric == "Message Sent"] == ["Message Sent"]


@pytest.mark.parametrize(
    ("state", "phone", "reason"),
    [
        ("blocked", "+5511987654321", "contact_blocked"),
        ("unsubscribed", "+5511987654321", "contact_unsubscribed"),
        ("subscribed", None, "contact_has_no_number"),
    ],
)
async def test_nothing_is_sent_to_who_does_not_want_it(play, state, phone, reason):
    play.channel()
    contact = play.contact(state=state, phone=phone)
    automation = play.automation("order_paid", {"type": "send_message", "body": "oi"}, {"type": "ai_respond"}, ADD_VIP)
    play.record(contact, fact="order_paid:1")
    await play.work()
    assert play.steps(automation) == [("skipped", reason), ("skipped", reason), ("done", None)]
    assert play.rows("SELECT 1 FROM messages") == []
    assert play.events("message.queued") + play.events("ai.response_requested") == []
    blocked = [event.payload["reason"] for event in play.events("system.send_blocked")]
    assert blocked == ([] if phone is None else [reason, reason])


async def test_what_a_step_cannot_do_fails_the_run_where_people_look(play):
    contact = play.contact()
    automation = play.automation("order_paid", {"type": "send_message", "body": "oi"}, ADD_VIP)
    play.record(contact, fact="order_paid:1")
    await play.work()
    assert play.states(automation) == [("failed", "no_channel")]
    assert "channel" in play.runs(automation)[0]["steps"][0]["error"]
    assert play.tags(contact) == []
    play.channel()
    play.execute(
        "INSERT INTO templates (organization_id, name, status) VALUES (%s, 't', 'rejected')", play.organization
    )
    other = play.automation("order_created", {"type": "send_template", "template": "t"})
    play.record(contact, "Order Placed", fact="order_placed:1")
    await play.work()
    assert play.states(other) == [("failed", "template_not_approved")]


async def test_triggers_by_metric_type_and_event_and_nobody_elses(play, database):
    contact = play.contact()
    by = {
        "metric": play.automation({"type": "metric", "metric": "NPS Answered"}, ADD_VIP),
        "type": play.automation({"type": "contact_event", "event_type": "form_submitted"}, ADD_VIP),
        "event": play.automation({"type": "event", "event_type": "lead.won"}, ADD_VIP),
        "text": play.automation(
            "message_received", ADD_VIP, conditions={"field": "message.text", "op": "contains", "value": "preço"}
        ),
        "off": play.automation("message_received", ADD_VIP, status="disabled"),
    }
    other = Play(database)
    other.automation({"type": "metric", "metric": "NPS Answered"}, ADD_VIP)
    by["webhook"] = play.automation({"type": "webhook", "source": "shopify"}, ADD_VIP)
    by["schedule"] = play.automation({"type": "schedule", "cron": "@daily", "audience": "contacts"}, ADD_VIP)
    # facts that are only called like what other triggers wait for
    for metric, kind in (("__webhook__", None), ("__schedule__", None), (None, "lead.won")):
        play.record(contact, metric, kind, fact=f"named:{metric or kind}")
    play.record(contact, "NPS Answered", fact="nps:1")
    play.record(contact, None, "form_submitted", fact="form:1")
    conversation = play.scalar(
        "INSERT INTO conversations (organization_id, contact_id) VALUES (%s, %s) RETURNING id",
        play.organization,
        contact,
    )
    for number, body in enumerate(("Qual o PREÇO?", "obrigada")):
        message = play.scalar(
            "INSERT INTO messages (organization_id, conversation_id, contact_id, direction, status, body)"
            " VALUES (%s, %s, %s, 'in', 'received', %s) RETURNING id",
            play.organization, conversation, contact, body,
        )  # fmt: skip
        play.record(
            contact, "Message Received", fact=f"received:{number}", entity_type="message", object_id=str(message)
        )
    pipeline = play.scalar(
        "INSERT INTO pipelines (organization_id, name) VALUES (%s, 'p') RETURNING id", play.organization
    )
    stage = play.scalar(
        "INSERT INTO stages (organization_id, pipeline_id, name, position) VALUES (%s, %s, 's', 0) RETURNING id",
        play.organization, pipeline,
    )  # fmt: skip
    lead = play.scalar(
        "INSERT INTO leads (organization_id, contact_id, pipeline_id, stage_id, name, source)"
        " VALUES (%s, %s, %s, %s, 'l', 'site') RETURNING id",
        play.organization, contact, pipeline, stage,
    )  # fmt: skip
    play.emit("lead.won", "lead", lead, {"value": 1, "won_at": "2026-11-30T00:00:00+00:00"})
    await play.work()
    assert {name: len(play.runs(automation)) for name, automation in by.items()} == {
        "metric": 1, "type": 1, "event": 1, "text": 1, "off": 0, "webhook": 0, "schedule": 0,
    }  # fmt: skip
    assert {run["contact_id"] for run in play.runs()} == {contact}


# Waits


async def test_a_wait_is_over_at_its_moment_once_and_across_a_new_process(play, database):
    contact = play.contact()
    automation = play.automation(
        "order_paid", ADD_VIP, {"type": "wait", "for": "2h"}, {"type": "add_tag", "tag": "depois"}
    )
    play.record(contact, fact="order_paid:1", value="10")
    await play.work()
    [run] = play.runs(automation)
    assert run["state"] == "waiting"
    assert run["wake_at"] == play.clock.now() + timedelta(hours=2)
    play.pass_time(timedelta(hours=1, minutes=59))
    await play.work()
    assert play.states(automation) == [("waiting", None)]
    play.workers = [type(play.workers[0])(None)]  # another process: what waits is in the database
    play.pass_time(timedelta(minutes=1))
    await play.work()
    assert play.states(automation) == [("done", None)]
    assert play.tags(contact) == ["depois", "vip"]
    [due] = play.events("system.automation_due")
    await play.again(due.id)
    assert [metric for metric, _ in play.facts()] == ["Tag Added", "Tag Added"]
    # a run that is done keeps nothing of what the event said
    assert play.rows("SELECT context FROM automation_runs") == [({},)]


async def test_an_edit_leaves_what_waits_as_it_began_and_new_runs_are_new(play):
    from afluente import postgres
    from consumers.automations import book

    contact = play.contact()
    automation = play.automation(
        "order_paid", {"type": "wait", "for": "1h"}, {"type": "add_tag", "tag": "one"}, name="a"
    )
    play.record(contact, fact="order_paid:1")
    await play.work()
    with postgres.connect(play.database.url) as conn:
        found = book.find(conn, "a", play.organization)
        source = {"name": "a", "trigger": {"type": "order_paid"}, "steps": [{"type": "add_tag", "tag": "two"}]}
        assert book.edit(conn, None, found, source, play.clock.now()).version == 2
    play.record(contact, fact="order_paid:2")
    await play.work()
    play.pass_time(timedelta(hours=1))
    await play.work()
    assert [(run["version"], run["state"]) for run in play.runs(automation)] == [(1, "done"), (2, "done")]
    assert play.tags(contact) == ["one", "two"]


async def test_paused_holds_what_wakes_and_disabled_cancels_it(play):
    contact = play.contact()
    automation = play.automation("order_paid", {"type": "wait", "for": "1h"}, ADD_VIP)
    play.record(contact, fact="order_paid:1")
    await play.work()
    play.set_status(automation, "paused")
    play.record(contact, fact="order_paid:2")  # starts nothing
    play.pass_time(timedelta(hours=1))
    await play.work()
    assert play.states(automation) == [("held", None)]
    assert play.set_status(automation, "enabled") == 1
    await play.work()
    assert play.states(automation) == [("done", None)]

    play.record(contact, fact="order_paid:3")
    await play.work()
    assert play.set_status(automation, "disabled") == 1
    assert play.states(automation)[1:] == [("cancelled", "automation_disabled")]
    assert play.steps(automation)[-1] == ("cancelled", "automation_disabled")
    assert play.rows("SELECT 1 FROM deferred_event") == []
    play.pass_time(timedelta(hours=1))
    await play.work()
    assert play.states(automation)[1:] == [("cancelled", "automation_disabled")]


async def test_what_happened_before_it_was_switched_on_starts_nothing_however_late_the_worker_is(play):
    contact = play.contact()
    play.record(contact, fact="order_paid:before")
    automation = play.automation("order_paid", ADD_VIP, status="disabled")
    play.record(contact, fact="order_paid:off")
    play.set_status(automation, "enabled")
    play.record(contact, fact="order_paid:imported", metadata={"automations": "no"})
    play.record(contact, fact="order_paid:on")
    play.set_status(automation, "paused")
    play.record(contact, fact="order_paid:paused")
    play.set_status(automation, "enabled")
    play.set_status(automation, "enabled")
    play.record(contact, fact="order_paid:imported again", metadata={"automations": "no"})
    play.record(contact, fact="order_paid:again")
    await play.work()
    # the one from before the pause is left out too: what would be done now is no longer what was on then
    [run] = play.runs(automation)
    [event] = [event for event in play.events() if event.id == run["trigger_event_id"]]
    assert event.payload["external_event_id"] == "order_paid:again"


async def test_a_fault_between_two_steps_leaves_nothing_and_the_next_attempt_does_all_once(play):
    play.channel()
    contact = play.contact()
    automation = play.automation(
        "order_paid", ADD_VIP, {"type": "send_message", "body": "oi"}, {"type": "wait", "for": "1h"}
    )
    play.record(contact, fact="order_paid:1")
    faults.arm("automation.after_step:2:raise")
    try:
        [ran] = await play.work()
    finally:
        faults.disarm()
    assert (ran.outcome, type(ran.error)) == ("failed", faults.FaultInjected)
    assert play.runs(automation) == []
    assert play.facts() + play.events("message.queued") == []
    [event] = play.events("contact_event.recorded")
    await play.again(event.id)
    assert play.states(automation) == [("waiting", None)]
    assert [metric for metric, _ in play.facts()] == ["Tag Added", "Conversation Opened"]
    assert len(play.events("message.queued")) == 1


# Loops


async def test_two_automations_that_set_each_other_off_stop_when_the_chain_comes_back(play):
    contact = play.contact()
    add = play.automation(
        {"type": "metric", "metric": "Tag Removed"}, {"type": "add_tag", "tag": "x"}, name="add when removed"
    )
    remove = play.automation("tag_added", {"type": "remove_tag", "tag": "x"}, name="remove when added")
    play.record(contact, "Tag Added", fact="tag_added:by-hand")
    play.execute(
        "WITH t AS (INSERT INTO tags (organization_id, name) VALUES (%s, 'x') RETURNING id)"
        " INSERT INTO contact_tag_links (organization_id, contact_id, tag_id) SELECT %s, %s, id FROM t",
        play.organization, play.organization, contact,
    )  # fmt: skip
    await play.work()
    assert play.states(remove) == [("done", None), ("stopped", guard.CAME_BACK)]
    assert play.states(add) == [("done", None)]
    [(kind, details, event)] = play.rows("SELECT kind, details, event_id FROM alerts")
    assert (kind, details["reason"]) == ("automation_loop", guard.CAME_BACK)
    stopped = play.runs(remove)[1]
    assert (details["run_id"], event) == (str(stopped["id"]), stopped["trigger_event_id"])
    assert stopped["steps"] == []
    # another contact's chain is its own
    other = play.contact("Bia", "+5511900000000", tags=["x"])
    play.record(other, "Tag Added", fact="tag_added:by-hand-2")
    await play.work()
    assert play.states(remove)[2:] == [("done", None), ("stopped", guard.CAME_BACK)]


async def test_the_same_two_an_hour_apart_go_on_until_the_chain_is_too_deep(play):
    contact = play.contact()
    automation = play.automation(
        {"type": "metric", "metric": "Tag Removed"},
        {"type": "wait", "for": "61m"},
        {"type": "add_tag", "tag": "x"},
        {"type": "remove_tag", "tag": "x"},
    )
    play.record(contact, "Tag Removed", fact="tag_removed:by-hand")
    for _ in range(12):
        await play.work()
        play.pass_time(timedelta(minutes=61))
        # what the server's clock says of events is behind the test's: the hour is between the runs' own times
    states = play.states(automation)
    assert states == [("done", None)] * 8 + [("stopped", guard.TOO_DEEP)]


async def test_a_loop_through_another_worker_is_followed_by_its_causes(play):
    """The message's own events are emitted by whoever sends it, caused by the event that had it sent."""
    play.channel()
    contact = play.contact()
    automation = play.automation({"type": "metric", "metric": "Message Sent"}, {"type": "send_message", "body": "oi"})
    play.record(contact, "Message Sent", fact="sent:by-hand")
    await play.work()
    [queued] = play.events("message.queued")
    play.emit(
        "message.sent", "message", queued.entity_id,
        {"direction": "out", "conversation_id": "c", "contact_id": str(contact), "channel": "whatsapp", "body": "oi",
         "message_id": str(queued.entity_id)},
        {"causation_id": str(queued.id), "causation_depth": queued.metadata["causation_depth"] + 1},
    )  # fmt: skip
    await play.work()
    assert play.states(automation) == [("done", None), ("stopped", guard.CAME_BACK)]
    assert len(play.events("message.queued")) == 1


# Schedules


async def test_a_schedule_comes_once_each_time_in_the_organizations_zone_for_its_audience(play):
    vip = play.contact(tags=["vip"])
    play.contact("Bia", "+5511900000000", tags=["vip"], state="blocked")
    play.contact("Caio", "+5511900000001")
    automation = play.automation(
        {"type": "schedule", "cron": "0 9 * * *", "audience": {"tag": "vip"}},
        {"type": "add_tag", "tag": "lembrado"},
        conditions={"field": "contact.subscriber_state", "op": "eq", "value": "subscribed"},
    )
    due = play.rows("SELECT next_due_at FROM automations")[0][0]
    assert due.hour == 12  # nine in Sao Paulo
    assert await play.tick() == []
    play.clock.set(due)
    assert len(await play.tick()) == 1
    assert await play.tick() == []
    await play.work()
    assert [(run["state"], run["contact_id"]) for run in play.runs(automation)] == [("done", vip)]
    play.clock.advance(timedelta(days=1))
    assert len(await play.tick()) == 1
    await play.work()
    assert len(play.runs(automation)) == 2
    assert play.rows("SELECT next_due_at FROM automations")[0][0] == due + timedelta(days=2)


async def test_times_that_passed_are_made_up_for_within_an_hour_and_said_beyond(play):
    play.automation({"type": "schedule", "cron": "*/20 * * * *"}, {"type": "wait", "for": "1s"})
    play.clock.advance(timedelta(hours=5))
    emitted = await play.tick()
    assert 3 <= len(emitted) <= 4  # an hour has three or four twenties
    dues = [event.payload["due_at"] for event in play.events("system.automation_due")]
    assert len(set(dues)) == len(dues) == len(emitted)
    assert play.rows("SELECT kind FROM alerts") == [("automation_schedule_missed",)]


async def test_an_audience_of_many_pages_is_reached_once_each(play, monkeypatch):
    monkeypatch.setattr("consumers.automations.schedules.PAGE", 4)
    contacts = {play.contact(f"c{n}", f"+55119000000{n:02}") for n in range(10)}
    automation = play.automation({"type": "schedule", "cron": "* * * * *", "audience": "contacts"}, ADD_VIP)
    play.clock.advance(timedelta(minutes=1))
    await play.tick()
    await play.work()
    assert sorted(run["contact_id"] for run in play.runs(automation)) == sorted(contacts)
    assert {run["state"] for run in play.runs(automation)} == {"done"}


# Deliveries that came in


async def test_a_delivery_that_came_in_starts_what_waits_for_it_once_it_is_normalised(play):
    channel = play.scalar(
        "INSERT INTO channels (organization_id, kind, source, external_id)"
        " VALUES (%s, 'generic', 'generic', 'box_office') RETURNING id",
        play.organization,
    )
    ana, bia = play.contact(), play.contact("Bia", "+5511900000000")
    mapped = {
        "type": "webhook",
        "channel": str(channel),
        "topic": "booked",
        "contact": {"phone": "customer.phones.number"},
    }
    automation = play.automation(
        mapped, ADD_VIP, conditions={"field": "webhook.body.seats", "op": "gt", "value": 1}, name="booked"
    )
    other = play.automation({"type": "webhook", "source": "stripe"}, ADD_VIP)
    by_name = play.automation({"type": "webhook", "source": "box_office", "topic": "cancelled"}, ADD_VIP)

    def arrives(body, topic="booked", status="processed"):
        row = play.scalar(
            "INSERT INTO webhook_events (organization_id, channel_id, source, topic, verification, status, raw_body)"
            " VALUES (%s, %s, 'generic', %s, 'verified', %s, %s) RETURNING id",
            play.organization, channel, topic, status, body.encode(),
        )  # fmt: skip
        payload = {"webhook_event_id": str(row), "source": "generic", "topic": topic}
        play.emit("webhook.received", "webhook_event", row, payload)
        return row

    row = arrives('{"seats": 2}', status="received")
    [ran] = await play.work()
    assert ran.outcome == "snoozed"
    play.execute("UPDATE webhook_events SET status = 'processed' WHERE id = %s", row)
    play.execute(
        "INSERT INTO contact_events (organization_id, contact_id, source_type, source, event_type, webhook_event_id,"
        " occurred_at) VALUES (%s, %s, 'EXTERNAL', 'generic', 'form_submitted', %s, now())",
        play.organization, ana, row,
    )  # fmt: skip
    await play.again(play.events("webhook.received")[0].id)

    arrives(
        '{"seats": 3.50, "customer": {"phones": [{"number": "nada"}, {"number": "11 90000-0000"}]}}'
    )  # known by phone
    arrives('{"seats": 2, "customer": {"phones": [{"number": "+5511933333333"}]}}')  # a stranger
    arrives('{"seats": 1}')  # the conditions do not hold
    arrives('{"seats": 2}', topic="cancelled")
    arrives("not json")
    await play.work()
    assert [(run["state"], run["contact_id"]) for run in play.runs(automation)] == [
        ("done", ana), ("done", bia), ("done", None),
    ]  # fmt: skip
    assert play.steps(automation) == [("done", None), ("done", None), ("skipped", "no_contact")]
    assert play.runs(other) == []
    assert len(play.runs(by_name)) == 1
