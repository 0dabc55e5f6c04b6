"""One POST of several numbers, divided: what the parts repeat is no more than what names them."""

import json

from producers.ingest.sources import whatsapp

NUMBERS = 200


def test_parts_together_are_not_many_times_the_body():
    changes = [
        {"field": "messages", "value": {"metadata": {"phone_number_id": str(number)}}} for number in range(NUMBERS)
    ]
    around = {"object": "whatsapp_business_account", "id": "102290129340398", "time": 1796020498, "x": "x" * 500_000}
    document = {**around, "entry": [{**around, "changes": changes}]}
    parts = whatsapp.route(json.dumps(document).encode(), {}, None)
    assert [part.external_id for part in parts] == [str(number) for number in range(NUMBERS)]
    assert sum(len(part.body or b"") for part in parts) < 100_000
    kept = json.loads(parts[0].body)
    named = {name: around[name] for name in ("object", "id", "time")}
    assert kept == {**named, "entry": [{**named, "changes": changes[:1]}]}
