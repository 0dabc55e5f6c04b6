DROP FUNCTION upsert_contact(uuid, jsonb, text, text);
DROP TABLE webhook_events;
DROP TABLE contact_tag_links;
DROP TABLE tags;
DROP TABLE contact_identities;
DROP TABLE contacts;
DROP TABLE channel_secrets;
DROP TABLE channels;
