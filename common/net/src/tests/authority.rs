//! A certificate authority that lives as long as a test.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    SanType, date_time_ymd,
};
use rustls::Connection;
use tempfile::TempDir;

use crate::auth::CredentialFiles;
use crate::tls::{TlsMaterial, TlsSession};

/// An authority, with the certificates that it has signed in files.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    directory: TempDir,
}

/// What a certificate says.
#[derive(Clone, Copy)]
pub(crate) struct Says<'a> {
    pub(crate) names: &'a [&'a str],
    /// The years in which it is valid.
    pub(crate) years: (i32, i32),
    pub(crate) usages: &'a [ExtendedKeyUsagePurpose],
}

impl Default for Says<'_> {
    fn default() -> Self {
        let usages = &[ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Says { names: &["127.0.0.1"], years: (2020, 2099), usages }
    }
}

impl Authority {
    pub(crate) fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        // Authorities of one name differ by their keys alone.
        let name = key.public_key_pem();
        params.distinguished_name.push(DnType::CommonName, &name[80..110]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap().pem();
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority { issuer: Issuer::new(params, key), certificate, directory };
        std::fs::write(authority.path("ca.pem"), &authority.certificate).unwrap();
        authority
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    /// Signs a certificate, and writes it and its key as `NAME.pem` and `NAME.key`.
    pub(crate) fn sign(&self, name: &str, says: Says<'_>) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        for name in says.names {
            params.subject_alt_names.push(match name.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) if name.starts_with('/') => SanType::URI((*name).try_into().unwrap()),
                Err(_) => SanType::DnsName((*name).try_into().unwrap()),
            });
        }
        params.not_before = date_time_ymd(says.years.0, 1, 1);
        params.not_after = date_time_ymd(says.years.1, 1, 1);
        params.extended_key_usages = says.usages.to_vec();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path(&format!("{name}.pem")), certificate.pem()).unwrap();
        write_secret(&self.path(&format!("{name}.key")), &key.serialize_pem());
    }

    /// Names the authority and a certificate that it has signed.
    pub(crate) fn files(&self, name: &str) -> CredentialFiles {
        let path = |end: &str| self.path(&format!("{name}.{end}"));
        self.trusting().certificate(path("pem"), path("key"))
    }

    /// Names the authority alone.
    pub(crate) fn trusting(&self) -> CredentialFiles {
        CredentialFiles::new().authority(self.path("ca.pem"))
    }

    /// Returns the sessions of a client and of a server.
    pub(crate) fn sessions(&self) -> (TlsSession, TlsSession) {
        self.sign("both", Says::default());
        let read = |name: &str| std::fs::read(self.path(name)).unwrap();
        let mut material = TlsMaterial::default();
        material.set_own(&read("both.pem"), &read("both.key")).unwrap();
        material.set_authority(&read("ca.pem")).unwrap();
        let client = material.client().unwrap().connection("127.0.0.1", None).unwrap();
        let server = material.server().unwrap().unwrap().connection().unwrap();
        let session = |mut connection: Connection| {
            connection.set_buffer_limit(None);
            TlsSession::new(connection)
        };
        (session(client.into()), session(server.into()))
    }
}

/// Writes a file that only this user can read.
pub(crate) fn write_secret(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}
