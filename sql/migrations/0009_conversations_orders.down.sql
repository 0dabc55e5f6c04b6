DROP FUNCTION mark_lead_won(uuid, text);
DROP FUNCTION mark_lead_lost(uuid, text);
DROP FUNCTION afluente.rebuild_conversations(uuid);
DROP TABLE leads, stages, pipelines, order_lines, orders, message_events, messages, conversations, templates;
DROP FUNCTION afluente.emit_lead_changes();
DROP FUNCTION afluente.apply_message();
DROP FUNCTION afluente.apply_message_event();
DROP FUNCTION afluente.lock_message();
DROP FUNCTION afluente.project_message(uuid, uuid);
