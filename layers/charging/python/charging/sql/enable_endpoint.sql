-- Lets an endpoint's deliveries go, those too that were held: it is not disabled any more, its breaker is closed, and a
-- pause is over. Locks that one row.
UPDATE webhook_endpoints
SET disabled_at = NULL,
    disabled_reason = NULL,
    failures_in_a_row = 0,
    opened_at = NULL,
    resumes_at = now()
WHERE id = %(endpoint_id)s AND principal = %(principal)s AND deleted_at IS NULL
RETURNING id
