-- What people say, buy and negotiate: conversations over an insert-only ledger of messages, orders by their ids at each
-- source, leads in their pipelines. Every foreign key between tenant tables carries organization_id.

-- What may be sent outside the 24-hour window; its state is the provider's.
CREATE TABLE templates (
    id               uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id  uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    channel_id       uuid,
    name             text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 255),
    language         text NOT NULL DEFAULT 'pt_BR' CHECK (language ~ '^[a-z]{2,3}(_[A-Z]{2})?$'),
    category         text NOT NULL DEFAULT 'utility' CHECK (category IN ('marketing', 'utility', 'authentication')),
    status           text NOT NULL DEFAULT 'draft'
                     CHECK (status IN ('draft', 'pending', 'approved', 'rejected', 'paused', 'disabled')),
    components       jsonb NOT NULL DEFAULT '[]' CHECK (jsonb_typeof(components) = 'array'),
    external_id      text CHECK (char_length(external_id) BETWEEN 1 AND 255),  -- the provider's id
    rejection_reason text CHECK (char_length(rejection_reason) <= 1000),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE NULLS NOT DISTINCT (organization_id, channel_id, name, language),
    FOREIGN KEY (organization_id, channel_id) REFERENCES channels (organization_id, id) ON DELETE CASCADE
);
SELECT tenancy.protect('templates');
GRANT SELECT, INSERT, UPDATE, DELETE ON templates TO afluente_app, afluente_admin, afluente_worker;

-- Status and assignment are set by people and workers; message_count and the three times follow from messages
-- (trigger below) and can be made again from them: afluente.rebuild_conversations.
CREATE TABLE conversations (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    contact_id      uuid NOT NULL,
    channel_id      uuid,
    channel         text NOT NULL DEFAULT 'whatsapp' CHECK (char_length(channel) BETWEEN 1 AND 100),
    status          text NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'resolved')),
    bot_active      boolean NOT NULL DEFAULT false,
    assigned_to     uuid,
    context         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(context) = 'object'),
    opened_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    resolved_at     timestamptz,
    message_count   integer NOT NULL DEFAULT 0 CHECK (message_count >= 0),
    first_message_at timestamptz,
    last_message_at timestamptz,
    last_inbound_at timestamptz,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    CHECK ((status = 'resolved') = (resolved_at IS NOT NULL)),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id),
    FOREIGN KEY (organization_id, channel_id) REFERENCES channels (organization_id, id),
    FOREIGN KEY (organization_id, assigned_to) REFERENCES members (organization_id, id) ON DELETE SET NULL (assigned_to)
);
COMMENT ON COLUMN conversations.last_inbound_at IS 'The 24-hour window for free messages ends a day after this.';
-- Two messages in one delivery open one conversation.
CREATE UNIQUE INDEX conversations_one_open
    ON conversations (organization_id, contact_id, channel_id) NULLS NOT DISTINCT WHERE status = 'open';
CREATE INDEX conversations_inbox ON conversations (organization_id, status, last_message_at DESC);  -- the inbox
CREATE INDEX conversations_contact ON conversations (organization_id, contact_id, opened_at DESC);  -- one contact's history
CREATE INDEX conversations_window ON conversations (last_inbound_at) WHERE status = 'open';         -- windows that expire
SELECT tenancy.protect('conversations');
GRANT SELECT, INSERT, UPDATE ON conversations TO afluente_app, afluente_admin, afluente_worker;

-- The ledger: rows are inserted and stay. status, sentiment and waha_message_id follow from message_events, by trigger;
-- nobody has the right to set them. Erasure (afluente_worker) may blank what a person said.
CREATE TABLE messages (
    id               uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id  uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    conversation_id  uuid NOT NULL,
    contact_id       uuid NOT NULL,
    direction        text NOT NULL CHECK (direction IN ('in', 'out')),
    message_type     text NOT NULL DEFAULT 'text' CHECK (char_length(message_type) BETWEEN 1 AND 100),
    body             text CHECK (char_length(body) <= 65536),
    media_urls       text[] NOT NULL DEFAULT '{}',
    template_id      uuid,
    reply_to         uuid,
    waha_message_id  text CHECK (char_length(waha_message_id) BETWEEN 1 AND 255),  -- the provider's id, whoever it is
    status           text NOT NULL
                     CHECK (status IN ('received', 'queued', 'sending', 'sent', 'delivered', 'read', 'failed')),
    status_at        timestamptz,
    sentiment        text CHECK (char_length(sentiment) <= 50),
    sentiment_score  numeric(4, 3) CHECK (sentiment_score BETWEEN -1 AND 1),
    metadata         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(metadata) = 'object'),
    occurred_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, waha_message_id),
    CHECK (status <> 'received' OR direction = 'in'),
    FOREIGN KEY (organization_id, conversation_id) REFERENCES conversations (organization_id, id),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id),
    FOREIGN KEY (organization_id, template_id) REFERENCES templates (organization_id, id) ON DELETE SET NULL (template_id),
    FOREIGN KEY (organization_id, reply_to) REFERENCES messages (organization_id, id)
);
CREATE INDEX messages_conversation ON messages (organization_id, conversation_id, occurred_at, id);  -- a conversation, read
CREATE INDEX messages_contact ON messages (organization_id, contact_id, occurred_at);                -- erasure, time line
CREATE INDEX messages_reply ON messages (organization_id, reply_to) WHERE reply_to IS NOT NULL;      -- answered already?
CREATE INDEX messages_stuck ON messages (created_at) WHERE status IN ('queued', 'sending');          -- recover-stuck-messages
SELECT tenancy.protect('messages');
GRANT SELECT ON messages TO afluente_app, afluente_admin, afluente_worker;
GRANT INSERT (id, organization_id, conversation_id, contact_id, direction, message_type, body, media_urls, template_id,
              reply_to, waha_message_id, status, metadata, occurred_at)
   ON messages TO afluente_app, afluente_admin, afluente_worker;
GRANT UPDATE (body, media_urls, metadata) ON messages TO afluente_worker;

-- What became of a message. A status may come before our own send returned: it then has the provider's id and no
-- message_id, and counts as soon as a message has that id.
CREATE TABLE message_events (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    message_id      uuid,
    waha_message_id text CHECK (char_length(waha_message_id) BETWEEN 1 AND 255),
    kind            text NOT NULL
                    CHECK (kind IN ('queued', 'sending', 'sent', 'delivered', 'read', 'failed', 'sentiment', 'edited', 'revoked', 'reaction')),
    source          text NOT NULL DEFAULT 'afluente' CHECK (char_length(source) BETWEEN 1 AND 100),
    external_id     text CHECK (char_length(external_id) BETWEEN 1 AND 255),  -- names the fact: 'read:wamid.X'
    error_code      text CHECK (char_length(error_code) <= 100),
    error_message   text CHECK (char_length(error_message) <= 1000),
    retryable       boolean,
    sentiment       text CHECK (char_length(sentiment) <= 50),
    sentiment_score numeric(4, 3) CHECK (sentiment_score BETWEEN -1 AND 1),
    details         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(details) = 'object'),
    occurred_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, source, external_id),
    CHECK (message_id IS NOT NULL OR waha_message_id IS NOT NULL),
    CHECK ((kind = 'sentiment') = (sentiment IS NOT NULL)),
    CHECK (kind = 'failed' OR (error_code IS NULL AND error_message IS NULL AND retryable IS NULL)),
    FOREIGN KEY (organization_id, message_id) REFERENCES messages (organization_id, id)
);
CREATE INDEX message_events_message ON message_events (organization_id, message_id, occurred_at);
CREATE INDEX message_events_held ON message_events (organization_id, waha_message_id) WHERE message_id IS NULL;
SELECT tenancy.protect('message_events');
GRANT SELECT, INSERT ON message_events TO afluente_app, afluente_admin, afluente_worker;
GRANT UPDATE (error_message, details) ON message_events TO afluente_worker;  -- erasure

-- Sets what follows from a message's events. The events are a set: their order of arrival changes nothing. The furthest of
-- queued < sending < sent < delivered < read holds; a failure holds only against what was not delivered and is not newer
-- (to the second: providers give whole seconds).
CREATE FUNCTION afluente.project_message(organization_id uuid, message_id uuid) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _waha      text;
    _direction text;
    _furthest  record;
    _failed    timestamptz;
    _sentiment record;
BEGIN
    SELECT m.waha_message_id, m.direction INTO _waha, _direction
      FROM public.messages m
     WHERE m.organization_id = project_message.organization_id AND m.id = project_message.message_id;
    IF _waha IS NULL THEN
        SELECT e.waha_message_id INTO _waha
          FROM public.message_events e
         WHERE e.organization_id = project_message.organization_id AND e.message_id = project_message.message_id
           AND e.waha_message_id IS NOT NULL
         ORDER BY e.occurred_at, e.id
         LIMIT 1;
    END IF;

    SELECT e.kind, max(e.occurred_at) AS at, r.rank INTO _furthest
      FROM public.message_events e
      JOIN (VALUES ('queued', 1), ('sending', 2), ('sent', 3), ('delivered', 4), ('read', 5)) r (kind, rank) USING (kind)
     WHERE e.organization_id = project_message.organization_id
       AND (e.message_id = project_message.message_id OR (e.message_id IS NULL AND e.waha_message_id = _waha))
     GROUP BY e.kind, r.rank
     ORDER BY r.rank DESC
     LIMIT 1;
    SELECT max(e.occurred_at) FILTER (WHERE e.kind = 'failed') INTO _failed
      FROM public.message_events e
     WHERE e.organization_id = project_message.organization_id
       AND (e.message_id = project_message.message_id OR (e.message_id IS NULL AND e.waha_message_id = _waha))
    HAVING max(e.occurred_at) FILTER (WHERE e.kind = 'failed')
           >= date_trunc('second', COALESCE(max(e.occurred_at) FILTER (WHERE e.kind IN ('queued', 'sending', 'sent')), '-infinity'));
    SELECT e.sentiment, e.sentiment_score INTO _sentiment
      FROM public.message_events e
     WHERE e.organization_id = project_message.organization_id
       AND e.message_id = project_message.message_id
       AND e.kind = 'sentiment'
     ORDER BY e.occurred_at DESC, e.id DESC
     LIMIT 1;

    UPDATE public.messages m
       SET waha_message_id = _waha,
           status = CASE
               WHEN _direction = 'in' THEN 'received'
               WHEN _failed IS NOT NULL AND COALESCE(_furthest.rank, 0) < 4 THEN 'failed'
               ELSE COALESCE(_furthest.kind, m.status)
           END,
           status_at = CASE
               WHEN _direction = 'in' THEN m.status_at
               WHEN _failed IS NOT NULL AND COALESCE(_furthest.rank, 0) < 4 THEN _failed
               ELSE _furthest.at
           END,
           sentiment = _sentiment.sentiment,
           sentiment_score = _sentiment.sentiment_score
     WHERE m.organization_id = project_message.organization_id AND m.id = project_message.message_id;
END;
$$;
REVOKE ALL ON FUNCTION afluente.project_message(uuid, uuid) FROM PUBLIC;

-- The message's row is locked before its foreign key is: events of one message come one after the other, and each sees
-- those before it. The other order deadlocks when two come at once and one of them brings the provider's id.
CREATE FUNCTION afluente.lock_message() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM public.messages m
      WHERE m.organization_id = NEW.organization_id
        AND (m.id = NEW.message_id OR (NEW.message_id IS NULL AND m.waha_message_id = NEW.waha_message_id))
        FOR UPDATE;
    RETURN NEW;
END;
$$;
CREATE TRIGGER lock_message BEFORE INSERT ON message_events FOR EACH ROW EXECUTE FUNCTION afluente.lock_message();

CREATE FUNCTION afluente.apply_message_event() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _message_id uuid := NEW.message_id;
BEGIN
    IF _message_id IS NULL THEN
        SELECT m.id INTO _message_id
          FROM public.messages m
         WHERE m.organization_id = NEW.organization_id AND m.waha_message_id = NEW.waha_message_id;
    END IF;
    IF _message_id IS NOT NULL THEN
        PERFORM afluente.project_message(NEW.organization_id, _message_id);
    END IF;
    RETURN NULL;
END;
$$;
CREATE TRIGGER project AFTER INSERT ON message_events FOR EACH ROW EXECUTE FUNCTION afluente.apply_message_event();

CREATE FUNCTION afluente.apply_message() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF NEW.waha_message_id IS NOT NULL AND EXISTS (
        SELECT FROM public.message_events e
         WHERE e.organization_id = NEW.organization_id AND e.message_id IS NULL AND e.waha_message_id = NEW.waha_message_id)
    THEN
        PERFORM afluente.project_message(NEW.organization_id, NEW.id);
    END IF;
    UPDATE public.conversations c
       SET message_count = c.message_count + 1,
           first_message_at = least(c.first_message_at, NEW.occurred_at),
           last_message_at = greatest(c.last_message_at, NEW.occurred_at),
           last_inbound_at = greatest(c.last_inbound_at, CASE NEW.direction WHEN 'in' THEN NEW.occurred_at END)
     WHERE c.organization_id = NEW.organization_id AND c.id = NEW.conversation_id;
    RETURN NULL;
END;
$$;
CREATE TRIGGER project AFTER INSERT ON messages FOR EACH ROW EXECUTE FUNCTION afluente.apply_message();

-- Sales. total_cents and its like are the currency's minor units, whatever their number.
CREATE TABLE orders (
    id                 uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id    uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    contact_id         uuid,
    channel_id         uuid,
    source             text NOT NULL CHECK (char_length(source) BETWEEN 1 AND 100),
    external_id        text NOT NULL CHECK (char_length(external_id) BETWEEN 1 AND 255),
    ns_order_id        text CHECK (char_length(ns_order_id) BETWEEN 1 AND 255),
    order_number       text CHECK (char_length(order_number) <= 255),
    status             text NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'cancelled', 'closed')),
    financial_status   text NOT NULL DEFAULT 'pending'
                       CHECK (financial_status IN ('pending', 'authorized', 'paid', 'partially_paid', 'partially_refunded', 'refunded', 'voided')),
    fulfillment_status text NOT NULL DEFAULT 'unfulfilled' CHECK (fulfillment_status IN ('unfulfilled', 'partial', 'fulfilled')),
    total_cents        bigint NOT NULL DEFAULT 0 CHECK (total_cents >= 0),
    refunded_cents     bigint NOT NULL DEFAULT 0 CHECK (refunded_cents >= 0),
    currency           text NOT NULL DEFAULT 'BRL' CHECK (currency ~ '^[A-Z]{3}$'),
    payment_method     text CHECK (char_length(payment_method) <= 100),
    cancel_reason      text CHECK (char_length(cancel_reason) <= 255),
    tracking           jsonb,
    properties         jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(properties) = 'object'),
    placed_at          timestamptz,
    paid_at            timestamptz,
    cancelled_at       timestamptz,
    fulfilled_at       timestamptz,
    source_updated_at  timestamptz,  -- an older delivery does not overwrite a newer state
    created_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, source, external_id),
    UNIQUE (organization_id, ns_order_id),
    CHECK (ns_order_id IS NULL OR source = 'nuvemshop'),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id),
    FOREIGN KEY (organization_id, channel_id) REFERENCES channels (organization_id, id)
);
COMMENT ON COLUMN orders.external_id IS 'The order''s id at its source; for Nuvemshop the same as ns_order_id.';
CREATE INDEX orders_contact ON orders (organization_id, contact_id, placed_at DESC);  -- one contact's purchases, erasure
CREATE INDEX orders_placed ON orders (organization_id, placed_at DESC);               -- the list
SELECT tenancy.protect('orders');
GRANT SELECT, INSERT, UPDATE ON orders TO afluente_app, afluente_admin, afluente_worker;

CREATE TABLE order_lines (
    id                  uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id     uuid NOT NULL,
    order_id            uuid NOT NULL,
    line_no             integer NOT NULL CHECK (line_no >= 1),
    external_id         text CHECK (char_length(external_id) BETWEEN 1 AND 255),
    product_external_id text CHECK (char_length(product_external_id) BETWEEN 1 AND 255),
    sku                 text CHECK (char_length(sku) <= 255),
    name                text NOT NULL CHECK (char_length(name) <= 1000),
    category            text CHECK (char_length(category) <= 255),
    quantity            numeric NOT NULL DEFAULT 1 CHECK (quantity > 0 AND quantity < 'Infinity'),
    unit_price_cents    bigint NOT NULL CHECK (unit_price_cents >= 0),
    total_cents         bigint NOT NULL CHECK (total_cents >= 0),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, order_id, line_no),
    FOREIGN KEY (organization_id, order_id) REFERENCES orders (organization_id, id) ON DELETE CASCADE
);
SELECT tenancy.protect('order_lines');
GRANT SELECT, INSERT, UPDATE, DELETE ON order_lines TO afluente_app, afluente_admin, afluente_worker;

CREATE TABLE pipelines (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    name            text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 100),
    is_default      boolean NOT NULL DEFAULT false,
    archived_at     timestamptz,
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    UNIQUE (organization_id, name)
);
CREATE UNIQUE INDEX pipelines_one_default ON pipelines (organization_id) WHERE is_default;
SELECT tenancy.protect('pipelines');
GRANT SELECT, INSERT, UPDATE, DELETE ON pipelines TO afluente_app, afluente_admin, afluente_worker;

CREATE TABLE stages (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL,
    pipeline_id     uuid NOT NULL,
    name            text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 100),
    position        integer NOT NULL CHECK (position >= 0),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, pipeline_id, id),
    UNIQUE (organization_id, pipeline_id, name),
    UNIQUE (organization_id, pipeline_id, position) DEFERRABLE,  -- so that two can change places
    FOREIGN KEY (organization_id, pipeline_id) REFERENCES pipelines (organization_id, id) ON DELETE CASCADE
);
SELECT tenancy.protect('stages');
GRANT SELECT, INSERT, UPDATE, DELETE ON stages TO afluente_app, afluente_admin, afluente_worker;

CREATE TABLE leads (
    id              uuid PRIMARY KEY DEFAULT uuidv7(),
    organization_id uuid NOT NULL REFERENCES organizations (id) ON DELETE CASCADE,
    contact_id      uuid NOT NULL,
    pipeline_id     uuid NOT NULL,
    stage_id        uuid NOT NULL,
    owner_id        uuid,
    name            text NOT NULL CHECK (char_length(name) BETWEEN 1 AND 255),
    source          text NOT NULL CHECK (char_length(source) BETWEEN 1 AND 100),
    value           numeric(18, 2) NOT NULL DEFAULT 0 CHECK (value >= 0),
    currency        text NOT NULL DEFAULT 'BRL' CHECK (currency ~ '^[A-Z]{3}$'),
    status          text NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'won', 'lost')),
    won_at          timestamptz,
    lost_at         timestamptz,
    closed_reason   text CHECK (char_length(closed_reason) <= 255),
    deleted_at      timestamptz,
    deleted_by      text CHECK (char_length(deleted_by) <= 255),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (organization_id, id),
    CHECK ((status = 'won') = (won_at IS NOT NULL)),
    CHECK ((status = 'lost') = (lost_at IS NOT NULL)),
    CHECK ((deleted_at IS NULL) = (deleted_by IS NULL)),
    FOREIGN KEY (organization_id, contact_id) REFERENCES contacts (organization_id, id),
    FOREIGN KEY (organization_id, pipeline_id, stage_id) REFERENCES stages (organization_id, pipeline_id, id),
    FOREIGN KEY (organization_id, owner_id) REFERENCES members (organization_id, id) ON DELETE SET NULL (owner_id)
);
CREATE INDEX leads_board ON leads (organization_id, pipeline_id, stage_id, updated_at DESC) WHERE deleted_at IS NULL;
CREATE INDEX leads_contact ON leads (organization_id, contact_id);  -- one contact's leads, erasure
SELECT tenancy.protect('leads');
GRANT SELECT, INSERT, UPDATE ON leads TO afluente_app, afluente_admin, afluente_worker;

-- lead.updated, lead.stage_changed, lead.assigned and lead.deleted, whoever changes the row. lead.created, lead.won and
-- lead.lost say more than the row does: their emitters write them (mark_lead_won, mark_lead_lost).
-- app.request_id, app.actor_id and app.automation_run of the transaction go along.
CREATE FUNCTION afluente.emit_lead_changes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _metadata jsonb := jsonb_strip_nulls(jsonb_build_object(
        'request_id', NULLIF(current_setting('app.request_id', true), ''),
        'actor_id', NULLIF(current_setting('app.actor_id', true), ''),
        'source', 'database'));
    _changes  jsonb;
BEGIN
    IF OLD.deleted_at IS NULL AND NEW.deleted_at IS NOT NULL THEN
        PERFORM public.emit_event_for(NEW.organization_id, 'lead.deleted', 'lead', NEW.id,
            jsonb_build_object('soft', true, 'deleted_by', NEW.deleted_by), _metadata);
    END IF;
    IF NEW.stage_id <> OLD.stage_id THEN
        PERFORM public.emit_event_for(NEW.organization_id, 'lead.stage_changed', 'lead', NEW.id,
            jsonb_strip_nulls(jsonb_build_object(
                'from_stage_id', OLD.stage_id,
                'to_stage_id', NEW.stage_id,
                'automation_run', NULLIF(current_setting('app.automation_run', true), ''))), _metadata);
    END IF;
    IF NEW.owner_id IS NOT NULL AND NEW.owner_id IS DISTINCT FROM OLD.owner_id THEN
        PERFORM public.emit_event_for(NEW.organization_id, 'lead.assigned', 'lead', NEW.id,
            jsonb_build_object('from_owner_id', OLD.owner_id, 'to_owner_id', NEW.owner_id), _metadata);
    END IF;
    SELECT jsonb_object_agg(n.key, jsonb_build_object('from', o.value, 'to', n.value)) INTO _changes
      FROM jsonb_each(to_jsonb(NEW)) n
      JOIN jsonb_each(to_jsonb(OLD)) o USING (key)
     WHERE n.value <> o.value
       AND n.key IN ('name', 'source', 'value', 'currency', 'contact_id', 'pipeline_id');
    IF NEW.owner_id IS NULL AND OLD.owner_id IS NOT NULL THEN
        _changes := COALESCE(_changes, '{}') || jsonb_build_object('owner_id', jsonb_build_object('from', OLD.owner_id, 'to', NULL));
    END IF;
    IF _changes IS NOT NULL THEN
        PERFORM public.emit_event_for(NEW.organization_id, 'lead.updated', 'lead', NEW.id,
            jsonb_build_object('changes', _changes), _metadata);
    END IF;
    RETURN NULL;
END;
$$;
CREATE TRIGGER emit_changes AFTER UPDATE ON leads FOR EACH ROW EXECUTE FUNCTION afluente.emit_lead_changes();

-- Firing a trigger needs no right to its function; calling it from a trigger on a table of one's own does. Whoever could
-- would write events and counts of other tenants.
REVOKE ALL ON FUNCTION afluente.lock_message(), afluente.apply_message_event(), afluente.apply_message(),
    afluente.emit_lead_changes() FROM PUBLIC;
