DROP FUNCTION IF EXISTS record_link_click(uuid, text, timestamptz);
DROP FUNCTION IF EXISTS create_tracked_link(text, uuid, uuid, integer, uuid, text);
DROP TABLE link_clicks, tracked_links, automation_step_runs, automation_runs, automation_secrets, automation_versions,
    automations;
