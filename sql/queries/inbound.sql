-- name: upsert_contact
SELECT contact_id, created, conflict
  FROM upsert_contact(%(organization_id)s, %(identities)s, %(name)s, %(source)s);

-- name: find_contact
-- The contact that identities name, the most telling first. Merged ones lead to the one that stays. One look-up for each
-- identity: as a join, a plan made when there were few reads all of the organization's.
SELECT COALESCE(c.merged_into, c.id)
  FROM jsonb_array_elements(%(identities)s) WITH ORDINALITY AS i (identity, place)
 CROSS JOIN LATERAL (
        SELECT ci.organization_id, ci.contact_id
          FROM contact_identities ci
         WHERE ci.organization_id = %(organization_id)s
           AND ci.kind = i.identity ->> 'kind'
           AND ci.source = COALESCE(i.identity ->> 'source', '')
           AND ci.value = i.identity ->> 'value'
         LIMIT 1) ci
  JOIN contacts c
    ON c.organization_id = ci.organization_id
   AND c.id = ci.contact_id
 ORDER BY i.place
 LIMIT 1;

-- name: contacts_of
-- Every contact that identities name, the most tellingly named first.
SELECT ci.contact_id
  FROM jsonb_array_elements(%(identities)s) WITH ORDINALITY AS i (identity, place)
 CROSS JOIN LATERAL (
        SELECT ci.organization_id, ci.contact_id
          FROM contact_identities ci
         WHERE ci.organization_id = %(organization_id)s
           AND ci.kind = i.identity ->> 'kind'
           AND ci.source = COALESCE(i.identity ->> 'source', '')
           AND ci.value = i.identity ->> 'value'
         LIMIT 1) ci
 GROUP BY ci.contact_id
 ORDER BY min(i.place);

-- name: hidden_contact
-- Who is known by this hidden number and by nothing else, and the contact of the phone behind it, when they are two.
SELECT h.contact_id, p.contact_id
  FROM contact_identities h
  JOIN contact_identities p
    ON p.organization_id = h.organization_id
   AND p.kind = 'phone'
   AND p.source = ''
   AND p.value = %(phone)s
   AND p.contact_id <> h.contact_id
 WHERE h.organization_id = %(organization_id)s
   AND h.kind = 'external'
   AND h.source = 'whatsapp_lid'
   AND h.value = %(lid)s
   AND NOT EXISTS (
       SELECT
         FROM contact_identities other
        WHERE other.organization_id = h.organization_id
          AND other.contact_id = h.contact_id
          AND other.source <> 'whatsapp_lid')
   AND NOT EXISTS (
       SELECT
         FROM contacts c
        WHERE c.organization_id = h.organization_id
          AND c.id IN (h.contact_id, p.contact_id)
          AND (c.anonymized_at IS NOT NULL OR c.merged_into IS NOT NULL));

-- name: merge_hidden
SELECT contact_id
  FROM merge_contacts(
    from_contact_id => %(from_contact_id)s,
    into_contact_id => %(into_contact_id)s,
    actor_id        => %(actor_id)s,
    reason          => 'WhatsApp names the phone behind a hidden number',
    actor_kind      => 'worker',
    metadata        => %(metadata)s);

-- name: contact_of_order_by_id
SELECT contact_id
  FROM orders
 WHERE organization_id = %(organization_id)s
   AND source = %(source)s
   AND external_id = %(value)s;

-- name: contact_of_order_by_number
-- A courier knows an order by the number that people see, with or without its '#'. The newest, if several shops count alike.
SELECT contact_id
  FROM orders
 WHERE organization_id = %(organization_id)s
   AND order_number IN (%(value)s, '#' || %(value)s, ltrim(%(value)s, '#'))
   AND (%(source)s::text IS NULL OR source = %(source)s)
 ORDER BY contact_id IS NULL, placed_at DESC NULLS LAST, id DESC
 LIMIT 1;

-- name: contact_of_order_by_tracking
-- A courier knows a parcel by its own number, which the shop was told.
SELECT contact_id
  FROM orders
 WHERE organization_id = %(organization_id)s
   AND tracking_number = %(value)s
   AND (%(source)s::text IS NULL OR source = %(source)s)
 ORDER BY contact_id IS NULL, placed_at DESC NULLS LAST, id DESC
 LIMIT 1;

-- name: contact_of_payment
-- The contact of an earlier fact about the same payment.
SELECT contact_id
  FROM contact_events
 WHERE organization_id = %(organization_id)s
   AND source = %(source)s
   AND external_event_id = ANY (%(external_event_ids)s)
 LIMIT 1;

-- name: add_identity
-- A person's new number. No row when it names somebody else.
INSERT INTO contact_identities (organization_id, kind, source, value, contact_id, as_received)
VALUES (%(organization_id)s, %(kind)s, %(source)s, %(value)s, %(contact_id)s, %(as_received)s)
ON CONFLICT (organization_id, kind, source, value) DO UPDATE
    SET as_received = contact_identities.as_received
  WHERE contact_identities.contact_id = excluded.contact_id
RETURNING contact_id;

-- name: set_phone
-- The number that a person changed to, unless it has changed on since.
UPDATE contacts
   SET phone_e164 = %(phone)s,
       updated_at = clock_timestamp()
 WHERE organization_id = %(organization_id)s
   AND id = %(contact_id)s
   AND phone_e164 IS DISTINCT FROM %(phone)s
   AND NOT EXISTS (
       SELECT
         FROM contact_events e
        WHERE e.organization_id = %(organization_id)s
          AND e.contact_id = ANY (afluente.contact_ids(%(organization_id)s, %(contact_id)s))
          AND e.external_event_id LIKE 'number_changed:%%'
          AND e.occurred_at >= %(at)s);

-- name: set_subscriber_state
-- The newest word of the person counts, and is the one that later ones are measured by, also when it says what was said
-- before; of two at one time the stricter one. `changed` says whether the state is another one. No row for an older word.
UPDATE contacts
   SET subscriber_state = %(state)s,
       subscriber_state_at = %(at)s,
       updated_at = clock_timestamp()
 WHERE organization_id = %(organization_id)s
   AND id = %(contact_id)s
   AND (COALESCE(subscriber_state_at, '-infinity'),
        array_position('{unknown,subscribed,unsubscribed,blocked}', subscriber_state))
       < (%(at)s, array_position('{unknown,subscribed,unsubscribed,blocked}', %(state)s))
RETURNING old.subscriber_state <> new.subscriber_state AS changed;

-- name: record_contact_event
SELECT record_contact_event(
    contact_id        => %(contact_id)s,
    event_type        => %(event_type)s,
    metric_name       => %(metric_name)s,
    source            => %(source)s,
    source_type       => %(source_type)s,
    external_event_id => %(external_event_id)s,
    object_id         => %(object_id)s,
    object_id_ref     => %(object_id_ref)s,
    entity_type       => %(entity_type)s,
    entity_id         => %(entity_id)s,
    value             => %(value)s,
    currency          => %(currency)s,
    occurred_at       => %(occurred_at)s,
    received_at       => %(received_at)s,
    properties        => %(properties)s,
    integration_id    => %(integration_id)s,
    webhook_event_id  => %(webhook_event_id)s,
    metadata          => %(metadata)s);

-- name: upsert_order
-- No row when a newer state is stored already, or one of the same moment that is further: shops count whole seconds. A
-- contact, once known, stays; of the times of what happened the first counts.
INSERT INTO orders AS o (
    organization_id, contact_id, channel_id, source, external_id, ns_order_id, order_number, status, financial_status,
    fulfillment_status, total_cents, currency, payment_method, cancel_reason, tracking, placed_at, paid_at, cancelled_at,
    fulfilled_at, source_updated_at)
VALUES (
    %(organization_id)s, %(contact_id)s, %(channel_id)s, %(source)s, %(external_id)s, %(ns_order_id)s, %(order_number)s,
    %(status)s, %(financial_status)s, %(fulfillment_status)s, %(total_cents)s, %(currency)s, %(payment_method)s,
    %(cancel_reason)s, %(tracking)s, %(placed_at)s, %(paid_at)s, %(cancelled_at)s, %(fulfilled_at)s,
    %(source_updated_at)s)
ON CONFLICT (organization_id, source, external_id) DO UPDATE
    SET contact_id = COALESCE(o.contact_id, excluded.contact_id),
        order_number = COALESCE(excluded.order_number, o.order_number),
        status = excluded.status,
        financial_status = excluded.financial_status,
        fulfillment_status = excluded.fulfillment_status,
        total_cents = excluded.total_cents,
        currency = excluded.currency,
        payment_method = COALESCE(excluded.payment_method, o.payment_method),
        cancel_reason = COALESCE(excluded.cancel_reason, o.cancel_reason),
        tracking = COALESCE(excluded.tracking, o.tracking),
        placed_at = LEAST(o.placed_at, excluded.placed_at),
        paid_at = LEAST(o.paid_at, excluded.paid_at),
        cancelled_at = LEAST(o.cancelled_at, excluded.cancelled_at),
        fulfilled_at = LEAST(o.fulfilled_at, excluded.fulfilled_at),
        source_updated_at = excluded.source_updated_at,
        updated_at = clock_timestamp()
  WHERE o.source_updated_at IS NULL
     OR (o.source_updated_at,
         array_position('{pending,authorized,partially_paid,paid,partially_refunded,refunded,voided}', o.financial_status),
         array_position('{open,closed,cancelled}', o.status),
         array_position('{unfulfilled,partial,fulfilled}', o.fulfillment_status))
     <= (excluded.source_updated_at,
         array_position('{pending,authorized,partially_paid,paid,partially_refunded,refunded,voided}', excluded.financial_status),
         array_position('{open,closed,cancelled}', excluded.status),
         array_position('{unfulfilled,partial,fulfilled}', excluded.fulfillment_status))
RETURNING id, contact_id;

-- name: older_order
-- An older state that comes late adds what was not known, so that the states of an order come to the same in any order.
UPDATE orders
   SET contact_id = COALESCE(contact_id, %(contact_id)s),
       order_number = COALESCE(order_number, %(order_number)s),
       payment_method = COALESCE(payment_method, %(payment_method)s),
       cancel_reason = COALESCE(cancel_reason, %(cancel_reason)s),
       tracking = COALESCE(tracking, %(tracking)s),
       placed_at = LEAST(placed_at, %(placed_at)s),
       paid_at = LEAST(paid_at, %(paid_at)s),
       cancelled_at = LEAST(cancelled_at, %(cancelled_at)s),
       fulfilled_at = LEAST(fulfilled_at, %(fulfilled_at)s)
 WHERE organization_id = %(organization_id)s
   AND source = %(source)s
   AND external_id = %(external_id)s
RETURNING id, contact_id;

-- name: checkout_seen
-- The newest state of a checkout. A row when a timer is wanted: it is open, not found left, and has none on its way.
INSERT INTO checkouts AS c (organization_id, source, token, channel_id, cart_token, webhook_event_id, value, currency,
                            product_ids, stage, source_updated_at, completed_at)
VALUES (%(organization_id)s, %(source)s, %(token)s, %(channel_id)s, %(cart_token)s, %(webhook_event_id)s, %(value)s,
        %(currency)s, %(product_ids)s, %(stage)s, %(source_updated_at)s, %(completed_at)s)
ON CONFLICT (organization_id, source, token) DO UPDATE
    SET cart_token = COALESCE(excluded.cart_token, c.cart_token),
        webhook_event_id = excluded.webhook_event_id,
        value = excluded.value,
        currency = excluded.currency,
        product_ids = excluded.product_ids,
        stage = excluded.stage,
        source_updated_at = excluded.source_updated_at,
        completed_at = LEAST(c.completed_at, excluded.completed_at)
  WHERE c.source_updated_at IS NULL OR c.source_updated_at <= excluded.source_updated_at
RETURNING CASE WHEN completed_at IS NULL AND abandoned_at IS NULL AND due_at IS NULL THEN token END AS wants_timer;

-- name: checkout_timer
UPDATE checkouts
   SET due_at = %(due_at)s
 WHERE organization_id = %(organization_id)s
   AND source = %(source)s
   AND token = %(token)s;

-- name: checkout
-- Where a checkout was last seen. No row when that delivery is gone: it was erased.
SELECT channel_id, webhook_event_id
  FROM checkouts
 WHERE organization_id = %(organization_id)s
   AND source = %(source)s
   AND token = %(token)s
   AND webhook_event_id IS NOT NULL;

-- name: checkout_due
-- A checkout whose timer has come, held until it is said what becomes of it. No row for what became an order, itself or
-- another one of the same cart, or was found left before.
SELECT c.source_updated_at, c.value, c.currency, c.product_ids, c.stage
  FROM checkouts c
 WHERE c.organization_id = %(organization_id)s
   AND c.source = %(source)s
   AND c.token = %(token)s
   AND c.completed_at IS NULL
   AND c.abandoned_at IS NULL
   AND c.source_updated_at IS NOT NULL
   AND NOT EXISTS (SELECT FROM checkouts o
                    WHERE o.organization_id = c.organization_id
                      AND o.source = c.source
                      AND o.cart_token = c.cart_token
                      AND o.completed_at IS NOT NULL)
   FOR UPDATE;

-- name: checkout_left
UPDATE checkouts
   SET due_at = NULL,
       abandoned_at = %(abandoned_at)s
 WHERE organization_id = %(organization_id)s
   AND source = %(source)s
   AND token = %(token)s;

-- name: checkout_completed
-- An order came of a checkout, known already or not, and of the others of its cart. Those that were found left before.
WITH own AS (
    INSERT INTO checkouts AS c (organization_id, source, token, channel_id, cart_token, completed_at)
    SELECT %(organization_id)s, %(source)s, %(token)s, %(channel_id)s, %(cart_token)s, %(completed_at)s
     WHERE %(token)s::text IS NOT NULL
    ON CONFLICT (organization_id, source, token) DO UPDATE
        SET completed_at = LEAST(c.completed_at, excluded.completed_at),
            cart_token = COALESCE(c.cart_token, excluded.cart_token)
    RETURNING token, abandoned_at
), others AS (
    UPDATE checkouts
       SET completed_at = LEAST(completed_at, %(completed_at)s)
     WHERE organization_id = %(organization_id)s
       AND source = %(source)s
       AND cart_token = %(cart_token)s
       AND token IS DISTINCT FROM %(token)s
    RETURNING token, abandoned_at
)
SELECT token
  FROM (SELECT * FROM own UNION ALL SELECT * FROM others) AS completed
 WHERE abandoned_at IS NOT NULL
 ORDER BY token;

-- name: contact_of_fact
-- The contact of a fact recorded before.
SELECT contact_id
  FROM contact_events
 WHERE organization_id = %(organization_id)s
   AND source = %(source)s
   AND external_event_id = %(external_event_id)s;

-- name: replace_lines
-- An order's lines as the newest state has them.
WITH gone AS (
    DELETE FROM order_lines
     WHERE organization_id = %(organization_id)s
       AND order_id = %(order_id)s
       AND line_no > %(lines)s
)
INSERT INTO order_lines (organization_id, order_id, line_no, external_id, product_external_id, sku, name, quantity,
                         unit_price_cents, total_cents)
SELECT %(organization_id)s, %(order_id)s, l.line_no, l.external_id, l.product_external_id, l.sku, l.name, l.quantity,
       l.unit_price_cents, l.total_cents
  FROM jsonb_to_recordset(%(content)s::jsonb -> 'lines') AS l (line_no integer, external_id text, product_external_id text, sku text,
                                             name text, quantity numeric, unit_price_cents bigint, total_cents bigint)
ON CONFLICT (organization_id, order_id, line_no) DO UPDATE
    SET external_id = excluded.external_id,
        product_external_id = excluded.product_external_id,
        sku = excluded.sku,
        name = excluded.name,
        quantity = excluded.quantity,
        unit_price_cents = excluded.unit_price_cents,
        total_cents = excluded.total_cents;

-- name: message
-- The message by the first of its names that is known.
SELECT id, conversation_id, contact_id, status, template_id, body, waha_message_id
  FROM messages
 WHERE organization_id = %(organization_id)s
   AND waha_message_id = ANY (%(names)s)
 ORDER BY array_position(%(names)s, waha_message_id)
 LIMIT 1;

-- name: hold_contact
-- Whoever else brings something of this contact's, by whatever identity, waits here for the end of this transaction.
SELECT FROM contacts WHERE organization_id = %(organization_id)s AND id = %(contact_id)s FOR NO KEY UPDATE;

-- name: message_in_any_chat
-- The same, for a linked phone: it may have named the chat by any number of the contact's, shown or hidden.
SELECT id, conversation_id, contact_id, status, template_id, body, waha_message_id
  FROM messages
 WHERE organization_id = %(organization_id)s
   AND waha_message_id = ANY (%(names)s || ARRAY(
       SELECT 'false_' || CASE ci.kind WHEN 'phone' THEN substr(ci.value, 2) || '@c.us' ELSE ci.value || '@lid' END
                       || tail
         FROM contact_identities ci
        CROSS JOIN unnest(%(tails)s::text[]) AS t (tail)
        WHERE ci.organization_id = %(organization_id)s
          AND ci.contact_id = %(contact_id)s
          AND (ci.kind = 'phone' OR (ci.kind = 'external' AND ci.source = 'whatsapp_lid'))))
 ORDER BY array_position(%(names)s, waha_message_id)
 LIMIT 1;

-- name: send_under_way
-- A message to this contact that a worker is sending, whose name at the provider is not known yet. What waits longer is
-- not under way any more.
SELECT m.id
  FROM messages m
  JOIN conversations c
    ON c.organization_id = m.organization_id
   AND c.id = m.conversation_id
 WHERE m.organization_id = %(organization_id)s
   AND m.contact_id = %(contact_id)s
   AND m.direction = 'out'
   AND m.status IN ('queued', 'sending')
   AND m.waha_message_id IS NULL
   AND m.created_at > clock_timestamp() - interval '15 minutes'
   AND (c.channel_id IS NULL OR c.channel_id = %(channel_id)s)
 LIMIT 1;

-- name: open_conversation
-- The contact's open conversation on the part's channel, opened if there is none; `opened` says which it was.
SELECT conversation_id, opened
  FROM open_conversation(
    contact_id       => %(contact_id)s,
    channel_id       => %(integration_id)s,
    context          => %(context)s,
    source           => %(source)s,
    metadata         => %(metadata)s,
    properties       => %(properties)s,
    source_type      => %(source_type)s,
    occurred_at      => %(occurred_at)s,
    received_at      => %(received_at)s,
    integration_id   => %(integration_id)s,
    webhook_event_id => %(webhook_event_id)s);

-- name: insert_message
INSERT INTO messages (organization_id, conversation_id, contact_id, direction, message_type, body, media_urls,
                      waha_message_id, status, metadata, occurred_at)
VALUES (%(organization_id)s, %(conversation_id)s, %(contact_id)s, %(direction)s, %(message_type)s, %(body)s,
        %(media_urls)s, %(waha_message_id)s, %(status)s, %(metadata)s, %(occurred_at)s)
ON CONFLICT (organization_id, waha_message_id) DO NOTHING
RETURNING id;

-- name: answer_message
-- The message that it answers is found by its names, now or when it comes.
SELECT answer_message(%(message_id)s, %(names)s);

-- name: insert_message_event
-- What became of a message, once. Held by the provider's id when the message is not known yet.
INSERT INTO message_events (organization_id, message_id, waha_message_id, kind, source, external_id, error_code,
                            error_message, retryable, details, occurred_at)
VALUES (%(organization_id)s, %(message_id)s, %(waha_message_id)s, %(kind)s, %(source)s, %(external_id)s, %(error_code)s,
        %(error_message)s, %(retryable)s, %(details)s, %(occurred_at)s)
ON CONFLICT (organization_id, source, external_id) DO NOTHING
RETURNING id;

-- name: held_statuses
-- What came about a message before it was known.
SELECT kind, occurred_at, error_code, error_message, retryable
  FROM message_events
 WHERE organization_id = %(organization_id)s
   AND waha_message_id = %(waha_message_id)s
   AND message_id IS NULL
   AND kind IN ('delivered', 'read', 'failed')
 ORDER BY occurred_at, id;

-- name: session_changed
-- The status before and the one now, when a session has another one. No row for what is known already, or older.
WITH told AS (
    INSERT INTO whatsapp_sessions AS s (organization_id, channel_id, session, status, status_at)
    VALUES (%(organization_id)s, %(channel_id)s, %(session)s, %(status)s, %(at)s)
    ON CONFLICT (organization_id, channel_id, session) DO UPDATE
        SET status = excluded.status,
            status_at = excluded.status_at,
            updated_at = clock_timestamp()
      WHERE s.status_at < excluded.status_at
    RETURNING old.status AS before, new.status AS now
)
SELECT before, now
  FROM told
 WHERE before IS DISTINCT FROM now;

-- name: uninstall_channel
UPDATE channels
   SET status = 'uninstalled',
       updated_at = clock_timestamp()
 WHERE organization_id = %(organization_id)s
   AND id = %(channel_id)s
   AND status <> 'uninstalled';

-- name: is_emitted
-- Whether an event of this key was emitted before, and is remembered.
SELECT event_id
  FROM event_idempotency
 WHERE organization_id = %(organization_id)s
   AND key = %(key)s;
