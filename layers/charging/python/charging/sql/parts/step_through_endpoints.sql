-- The endpoints with deliveries to be sent, in the order of their ids, as the step `waiting`, which begins with %(after)s
-- itself: a step through outbox_deliveries_open for each endpoint, however many deliveries wait there. The step's own
-- order is that of the whole index, so that no other one can serve it: by the primary key it would read all that an
-- endpoint was ever sent.
waiting (endpoint_id) AS (
    SELECT %(after)s::uuid
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
