"""The certificates that vouch for a database server on RDS, one file for each region, and one for RDS Proxy.

AWS publishes them at https://truststore.pki.rds.amazonaws.com/ and https://www.amazontrust.com/repository/. A file for
each region, since every connection reads its file: that of all regions would cost each cold start some 70 ms.
docs/deploy.md says how the files were checked, and how to add a region's.
"""

import os
from pathlib import Path

from charging import errors


def roots_for(host: str) -> Path:
    """Returns the file of roots that the certificate of an RDS instance, cluster or proxy in this region leads to.

    Raises Misconfigured where there is none for the region: no server is trusted unseen.
    """
    region = os.environ.get("AWS_REGION", "")
    name = "proxy" if ".proxy-" in host else region
    roots = Path(__file__).with_name(f"{name}.pem")
    if not name or not roots.is_file():
        raise errors.Misconfigured(
            f"IAM authentication was chosen (DATABASE_PASSWORD is empty), and there are no certificates of RDS for the "
            f"region '{region}'. Add {region or '<region>'}.pem as docs/deploy.md says."
        )
    return roots
