-- Waits until nobody else is at work under the key, and holds it then: the claim that follows in the same
-- transaction gets the lock at once. Those who wait are let in one after another, so the first makes good what a
-- twin has rolled back, and the others find it stored.
--
-- When the time is up the server ends the wait with 55P03. What the claim then waits for, it waits for as long as any
-- statement does. Takes the key's advisory lock; writes nothing.
WITH usual AS MATERIALIZED (
    SELECT current_setting('lock_timeout') AS lock_timeout
)
SELECT
    set_config('lock_timeout', %(wait_ms)s::text, true),
    pg_advisory_xact_lock(
        hash_record_extended(ROW(%(principal)s::text, %(endpoint)s::text, %(key)s::uuid), 0)
    ),
    set_config('lock_timeout', lock_timeout, true)
FROM usual
