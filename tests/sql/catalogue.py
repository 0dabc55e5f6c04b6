"""The catalogue of a database as plain data: what two migrated databases are compared by."""

SYSTEM = "n.nspname NOT IN ('pg_catalog', 'information_schema', 'migration') AND n.nspname !~ '^pg_(toast|temp)'"

_PARTS = {
    "schemas": f"""
        SELECT n.nspname, ARRAY(SELECT a::text FROM unnest(n.nspacl) a ORDER BY 1)
          FROM pg_namespace n WHERE {SYSTEM}""",
    "relations": f"""
        SELECT n.nspname, c.relname, c.relkind, c.relrowsecurity, c.relforcerowsecurity, c.relowner::regrole::text,
               ARRAY(SELECT a::text FROM unnest(c.relacl) a ORDER BY 1), c.reloptions,
               pg_get_expr(c.relpartbound, c.oid), obj_description(c.oid, 'pg_class'),
               CASE WHEN c.relkind IN ('v', 'm') THEN pg_get_viewdef(c.oid) END
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {SYSTEM} AND c.relkind <> 'i' AND c.relkind <> 'I'""",
    "columns": f"""
        SELECT n.nspname, c.relname, a.attname, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum),
               format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
               pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum),
               ARRAY(SELECT x::text FROM unnest(a.attacl) x ORDER BY 1)
          FROM pg_attribute a
          JOIN pg_class c ON c.oid = a.attrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
          LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
         WHERE {SYSTEM} AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind <> 'i' AND c.relkind <> 'I'""",
    "constraints": f"""
        SELECT n.nspname, c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid)
          FROM pg_constraint c JOIN pg_namespace n ON n.oid = c.connamespace WHERE {SYSTEM}""",
    "indexes": f"""
        SELECT n.nspname, i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid), i.indisvalid
          FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {SYSTEM}""",
    "triggers": f"""
        SELECT t.tgrelid::regclass::text, t.tgname, pg_get_triggerdef(t.oid)
          FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {SYSTEM} AND NOT t.tgisinternal""",
    "policies": """
        SELECT p.polrelid::regclass::text, p.polname, p.polcmd, p.polpermissive,
               ARRAY(SELECT r::regrole::text FROM unnest(p.polroles) r ORDER BY 1),
               pg_get_expr(p.polqual, p.polrelid), pg_get_expr(p.polwithcheck, p.polrelid)
          FROM pg_policy p""",
    "functions": f"""
        SELECT n.nspname, p.oid::regprocedure::text, pg_get_functiondef(p.oid), p.proowner::regrole::text,
               ARRAY(SELECT a::text FROM unnest(p.proacl) a ORDER BY 1)
          FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE {SYSTEM} AND p.prokind = 'f'""",
    "types": f"""
        SELECT n.nspname, t.typname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
         WHERE {SYSTEM} AND t.typtype IN ('d', 'e', 'r')""",
    "extensions": "SELECT extname FROM pg_extension",
}


def catalogue(conn):
    """Everything that makes the schema, by kind, as sorted lists of tuples. Oids and data are left out."""
    with conn.transaction():
        # so that names are qualified whatever the login's own search_path is
        conn.execute("SET LOCAL search_path = pg_catalog")
        found = {}
        for part, query in _PARTS.items():
            rows = [tuple(tuple(v) if isinstance(v, list) else v for v in row) for row in conn.execute(query)]
            found[part] = sorted(rows, key=repr)
    return found


def difference(one, other):
    """What is in one catalogue and not in the other, as readable lines: empty when equal."""
    lines = []
    for part in one:
        mine, theirs = set(one[part]), set(other[part])
        lines += [f"- {part}: {row}" for row in sorted(mine - theirs, key=repr)]
        lines += [f"+ {part}: {row}" for row in sorted(theirs - mine, key=repr)]
    return lines
