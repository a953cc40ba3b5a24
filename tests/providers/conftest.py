"""What tests of providers share: certificates."""

from pathlib import Path

import pytest
import trustme


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for localhost and 127.0.0.1 and its key, signed by the authority in `ca.pem`."""
    folder = tmp_path_factory.mktemp("authority")
    signer = trustme.CA()
    issued = signer.issue_cert("localhost", "127.0.0.1")
    signer.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    for part in issued.cert_chain_pems:
        part.write_to_path(folder / "cert.pem", append=True)
    return folder
