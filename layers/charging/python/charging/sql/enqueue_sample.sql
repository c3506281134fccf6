-- Writes the delivery of a test event to one endpoint, whatever types that wants, and returns the event's id: the same
-- one for ten seconds, for which the sequence stands, so that nobody is flooded with tests. No row where the principal
-- has no such endpoint.
--
-- Locks its own new row. A test that is written at the same moment is waited for, and then not seen: none is returned.
WITH endpoint AS (
    SELECT id, (EXTRACT(EPOCH FROM now()) / 10)::int AS sequence
    FROM webhook_endpoints
    WHERE id = %(endpoint_id)s AND principal = %(principal)s AND deleted_at IS NULL
),
written AS (
    INSERT INTO outbox_deliveries (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)
    SELECT
        id, %(event_id)s, %(event_type)s, id, sequence,
        left(%(event)s::text, -1)
            || to_char(now() AT TIME ZONE 'UTC', ',"\"time\":\""YYYY-MM-DD"T"HH24:MI:SS.US"Z\"}"')
    FROM endpoint
    ON CONFLICT (endpoint_id, aggregate_id, event_type, sequence) DO NOTHING
    RETURNING event_id
)
SELECT event_id FROM written
UNION ALL
SELECT outbox_deliveries.event_id
FROM endpoint
JOIN outbox_deliveries
    ON endpoint_id = endpoint.id AND aggregate_id = endpoint.id
    AND event_type = %(event_type)s AND outbox_deliveries.sequence = endpoint.sequence
