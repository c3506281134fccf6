-- Reads an endpoint's deliveries, the youngest first, beginning below a given one, each with its last attempts. Reads
-- outbox_deliveries and delivery_attempts by their primary keys, and no more of them than it returns.
SELECT
    event_id, event_type, aggregate_id, status, next_attempt_at, last_error, created_at, sent_at, failed_at,
    COALESCE(
        (
            SELECT jsonb_agg(
                jsonb_build_object(
                    'attempt', attempt, 'endedAt', to_char(ended_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
                    'durationMs', duration_ms, 'status', delivery_attempts.status, 'error', error, 'excerpt', excerpt
                )
                ORDER BY attempt
            )
            FROM delivery_attempts
            WHERE delivery_attempts.endpoint_id = outbox_deliveries.endpoint_id
              AND delivery_attempts.event_id = outbox_deliveries.event_id
        ),
        '[]'::jsonb
    ) AS attempts
FROM outbox_deliveries
WHERE outbox_deliveries.endpoint_id = %(endpoint_id)s
  AND (%(before)s::uuid IS NULL OR outbox_deliveries.event_id < %(before)s)
ORDER BY outbox_deliveries.event_id DESC
LIMIT %(limit)s
