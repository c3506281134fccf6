-- Waits until nobody is at work under the key, at most as long as it is told. When the time is up the server ends the
-- wait with 55P03. Takes the key's advisory lock shared, so that all who wait are let go together, and writes nothing.
SELECT
    set_config('lock_timeout', %(wait_ms)s::text, true),
    pg_advisory_xact_lock_shared(
        hash_record_extended(ROW(%(principal)s::text, %(endpoint)s::text, %(key)s::uuid), 0)
    )
