-- needs: 0016
-- The part of an error's text that is the same whenever the same thing goes wrong: the query of URLs, addresses, ids, times,
-- numbers and what stands in quotes are cut. Names in quotes stay ('order_id'), and so do HTTP statuses. At most 300
-- characters. A better rule gets another name, and afluente.cause_id another version: causes that people know must not
-- change their ids unseen.
CREATE OR REPLACE FUNCTION afluente.error_pattern(error text) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _rules CONSTANT text[] := ARRAY[
        ['\s+', ' '],
        ['(https?://)[^\s/@]*@', '\1'],
        ['(https?://[^\s?#"''<>]*)[?#][^\s"''<>]*', '\1?…'],
        ['[^\s@<>"'':=,;()]+@[^\s@<>"'':=,;()]+\.[A-Za-z]{2,}', '<email>'],
        ['[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}', '<id>'],
        ['(?c)(^|[^[:alnum:]])''(?![a-z_][a-z_.]*'')[^'']*''', '\1''…'''],
        ['(?c)(^|[^[:alnum:]])"(?![a-z_][a-z_.]*")[^"]*"', '\1"…"'],
        ['\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d([.,]\d+)?)?( ?(Z|[+-]\d\d(:?\d\d)?))?', '<time>'],
        ['\m0x[0-9a-f]+\M', '<n>'],
        ['\m(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}\M', '<id>'],
        ['(?<![0-9])(?<!(?:http|status|code|answered)(?:/[0-9.<n>]+)?[ :=]{1,2})[0-9]+(?:[.,][0-9]+)*', '<n>']
    ];
    _text text := left(error_pattern.error, 500);
BEGIN
    FOR _i IN 1 .. array_length(_rules, 1)
    LOOP
        _text := regexp_replace(_text, _rules[_i][1], _rules[_i][2], 'gi');
    END LOOP;
    RETURN left(btrim(_text), 300);
END;
$$;
REVOKE ALL ON FUNCTION afluente.error_pattern(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.error_pattern(text) TO afluente_worker, afluente_admin;
