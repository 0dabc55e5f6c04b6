-- needs: 0019
-- Makes a link that counts its clicks and returns its token: the link is <AFLUENTE_LINKS_URL>/l/<token>. With a contact,
-- a click is that contact's "Link Clicked". The address must be https, without user and password; other characters than
-- those of a URL are refused (percent-encode them).
--
-- `token` is for callers that need it before the row can be (the text of the message that the link points from); it must
-- be 128 random bits in base64url.
CREATE OR REPLACE FUNCTION create_tracked_link(
    url               text,
    contact_id        uuid DEFAULT NULL,
    automation_run_id uuid DEFAULT NULL,
    step              integer DEFAULT NULL,
    message_id        uuid DEFAULT NULL,
    token             text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _token text := COALESCE(
        create_tracked_link.token,
        -- 244 bits of the server's strong random source, in 128.
        translate(rtrim(encode(substr(sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())), 1, 16), 'base64'), '='),
                  '+/', '-_'));
BEGIN
    IF auth.organization_id() IS NULL THEN
        RAISE EXCEPTION 'no organization: a link belongs to one' USING ERRCODE = 'AF001',
            HINT = 'Set app.organization_id for the transaction (workers: act for the organization).';
    END IF;
    INSERT INTO public.tracked_links (organization_id, token, url, contact_id, automation_run_id, step, message_id)
    VALUES (auth.organization_id(), _token, create_tracked_link.url, create_tracked_link.contact_id,
            create_tracked_link.automation_run_id, create_tracked_link.step, create_tracked_link.message_id);
    RETURN _token;
EXCEPTION
    WHEN check_violation THEN
        RAISE EXCEPTION 'not an address that a link may lead to: %', left(create_tracked_link.url, 200)
            USING ERRCODE = 'AF004', HINT = 'https, without user and password, percent-encoded, at most 2048 characters.';
END;
$$;
REVOKE ALL ON FUNCTION create_tracked_link(text, uuid, uuid, integer, uuid, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION create_tracked_link(text, uuid, uuid, integer, uuid, text)
    TO afluente_app, afluente_worker, afluente_admin;
