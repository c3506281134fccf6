-- What list_events.sql leaves out of single events: their payload, up to so many characters, their times, and the latest
-- of what operators did to them.
--
-- Finds the events by primary key; reads through operator_actions, which is as long as operators made it. Locks and writes
-- nothing.
SELECT
    outbox.id,
    left(outbox.payload, %(characters)s) AS payload,
    octet_length(outbox.payload) AS payload_bytes,
    outbox.created_at,
    outbox.next_attempt_at,
    outbox.published_at,
    outbox.failed_at,
    COALESCE(
        (
            SELECT json_agg(taken ORDER BY taken.at DESC)
            FROM (
                SELECT id, taken_at AS at, action, operator, reason
                FROM operator_actions
                WHERE outbox.id = ANY (event_ids)
                ORDER BY taken_at DESC
                LIMIT 20
            ) AS taken
        ),
        '[]'
    ) AS actions
FROM outbox
WHERE outbox.id = ANY (%(ids)s)
ORDER BY array_position(%(ids)s::uuid[], outbox.id)
