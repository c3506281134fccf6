-- The committed STARTED keys, up to a limit, the oldest first, without whose they are. Uses the partial index
-- idempotency_keys_started; locks and writes nothing.
SELECT endpoint, key, created_at
FROM idempotency_keys
WHERE status = 'STARTED'
ORDER BY created_at
LIMIT %(limit)s
