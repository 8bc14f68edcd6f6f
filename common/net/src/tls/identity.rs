//! Names in certificates: the task that a server must be, and what a client may call itself.

use std::sync::Arc;

use pushpull_common::ids::TaskId;
use pushpull_common::names::NamePattern;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore, SignatureScheme,
};
use thiserror::Error;
use webpki::EndEntityCert;

use crate::auth::token_file::tasks_of;

/// Returns the names in a certificate: URIs, such as `/job:ps/task:0`, then those of hosts.
pub(super) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    let uris = certificate.valid_uri_names();
    uris.chain(certificate.valid_dns_names()).map(str::to_owned).collect()
}

/// Accepts the certificate of a server if the authority has signed it, and it names the server.
#[derive(Debug)]
pub(super) struct ServerVerifier {
    pub(super) roots: Arc<RootCertStore>,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
    /// The task that the server must be, if that is known.
    pub(super) task: Option<TaskId>,
}

impl ServerVerifier {
    /// Checks the names. A certificate that names tasks is one of these tasks, wherever it runs. One
    /// that names none must name the host that was connected to.
    fn check_names(
        &self,
        certificate: &CertificateDer<'_>,
        parsed: &ParsedCertificate<'_>,
        host: &ServerName<'_>,
    ) -> Result<(), Error> {
        let tasks = tasks_of(&names(certificate));
        let Some(task) = self.task.as_ref().filter(|_| !tasks.is_empty()) else {
            return verify_server_name(parsed, host);
        };
        if tasks.iter().any(|names| names.matches(&task.to_string())) {
            return Ok(());
        }
        let found = tasks.iter().map(NamePattern::to_string).collect::<Vec<_>>().join(", ");
        let other = OtherError(Arc::new(OtherTask { wanted: task.clone(), found }));
        Err(Error::InvalidCertificate(CertificateError::Other(other)))
    }
}

/// The certificate is that of another task.
#[derive(Debug, Error)]
#[error("it is the certificate of {found}, not of {wanted}")]
struct OtherTask {
    wanted: TaskId,
    found: String,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.algorithms.all;
        let roots = &self.roots;
        verify_server_cert_signed_by_trust_anchor(&parsed, roots, intermediates, now, algorithms)?;
        self.check_names(end_entity, &parsed, server_name)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
