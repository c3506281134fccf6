-- For how many seconds the oldest delivery has been due that nothing holds back; 0 when none is. A delivery counts from
-- when it could be sent: those that wait for their next attempt, and those of an endpoint that is disabled, paused or
-- open, wait for the receiver and not for us. An endpoint that is enabled again, or whose breaker closes, begins anew.
--
-- Steps from endpoint to endpoint by outbox_deliveries_open, as the claim does, and reads one row of each.
WITH RECURSIVE waiting (endpoint_id) AS (
    (
        SELECT endpoint_id
        FROM outbox_deliveries
        WHERE status IN ('PENDING', 'CLAIMED', 'RETRY')
        ORDER BY endpoint_id, next_attempt_at, event_id
        LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT delivery.endpoint_id
        FROM outbox_deliveries AS delivery
        WHERE delivery.endpoint_id > waiting.endpoint_id AND delivery.status IN ('PENDING', 'CLAIMED', 'RETRY')
        ORDER BY delivery.endpoint_id, delivery.next_attempt_at, delivery.event_id
        LIMIT 1
    )
    FROM waiting
    WHERE waiting.endpoint_id IS NOT NULL
),
oldest AS (
    SELECT greatest(
        resumes_at,
        (
            SELECT outbox_deliveries.next_attempt_at
            FROM outbox_deliveries
            WHERE outbox_deliveries.endpoint_id = waiting.endpoint_id AND status IN ('PENDING', 'CLAIMED', 'RETRY')
            ORDER BY outbox_deliveries.next_attempt_at
            LIMIT 1
        )
    ) AS due_at
    FROM waiting
    JOIN webhook_endpoints ON id = waiting.endpoint_id
    WHERE disabled_at IS NULL AND deleted_at IS NULL
      AND opened_at IS NULL AND (resumes_at IS NULL OR resumes_at <= now())
)
SELECT greatest(COALESCE(EXTRACT(EPOCH FROM now() - min(due_at)), 0), 0)::float8 AS oldest_age_seconds
FROM oldest
