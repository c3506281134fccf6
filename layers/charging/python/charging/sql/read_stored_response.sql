-- Reads the response that a principal's key would replay now, by primary key.
SELECT response_status, response_headers, response_body
FROM idempotency_keys
WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
  AND status = 'COMPLETED' AND expires_at > now()
