//! [`TlsMaterial`]: certificates and keys from files, and the settings of both sides that they make.

use std::io;
use std::sync::Arc;

use pushpull_common::ids::{RequestId, TaskId};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, Connection, OtherError, RootCertStore,
    ServerConfig, ServerConnection,
};
use thiserror::Error;
use tokio::io::Interest;

use super::identity::{ServerVerifier, names};
use super::session::{HandshakeStep, TlsSession};
use crate::auth::ChannelBinding;
use crate::stream::Stream;

/// The protocol of a connection, so that its records are not taken for those of another one.
const ALPN: &[u8] = b"pushpull/1";

/// The label under which the binding of a channel is exported (RFC 9266).
const BINDING_LABEL: &[u8] = b"EXPORTER-Channel-Binding";

/// A fault of a file of certificates or keys.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsFileError {
    /// It is not PEM.
    #[error("it is no PEM file")]
    Pem {
        /// What is wrong with it.
        source: pem::Error,
    },
    /// It has no certificate.
    #[error("it has no certificate")]
    NoCertificate,
    /// The file of its key has none.
    #[error("the file of its key has no private key in PEM")]
    NoKey,
    /// A certificate or key is not usable.
    #[error("it cannot be used for TLS")]
    Unusable {
        /// Why.
        source: rustls::Error,
    },
    /// The key is that of another certificate.
    #[error("its key is not that of the certificate")]
    OtherKey,
}

impl From<rustls::Error> for TlsFileError {
    fn from(source: rustls::Error) -> TlsFileError {
        TlsFileError::Unusable { source }
    }
}

impl From<pem::Error> for TlsFileError {
    fn from(source: pem::Error) -> TlsFileError {
        TlsFileError::Pem { source }
    }
}

/// The certificate of this task, and the authority that has signed those of others.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsMaterial {
    own: Option<Arc<CertifiedKey>>,
    roots: Option<Arc<RootCertStore>>,
}

impl TlsMaterial {
    /// Takes the certificate of this task, with those between it and the authority.
    ///
    /// # Errors
    /// Every [`TlsFileError`].
    pub(crate) fn set_own(&mut self, certificates: &[u8], key: &[u8]) -> Result<(), TlsFileError> {
        let chain = certificates_of(certificates)?;
        // Its error would display what it has read.
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsFileError::NoKey)?;
        let own = CertifiedKey::from_der(chain, key, &provider()).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => TlsFileError::OtherKey,
            error => error.into(),
        })?;
        self.own = Some(Arc::new(own));
        Ok(())
    }

    /// Takes the certificates of the authority: those of other tasks must be signed by one of them.
    ///
    /// # Errors
    /// Every [`TlsFileError`].
    pub(crate) fn set_authority(&mut self, certificates: &[u8]) -> Result<(), TlsFileError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates_of(certificates)? {
            roots.add(certificate)?;
        }
        self.roots = Some(Arc::new(roots));
        Ok(())
    }

    /// Returns the settings of a server, if there is a certificate.
    ///
    /// # Errors
    /// [`TlsFileError::Unusable`].
    pub(crate) fn server(&self) -> Result<Option<ServerTls>, TlsFileError> {
        let Some(own) = &self.own else { return Ok(None) };
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?;
        let builder = match &self.roots {
            None => builder.with_no_client_auth(),
            Some(roots) => {
                // A client without a certificate may have an access token.
                let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider)
                    .allow_unauthenticated()
                    .build()
                    .map_err(|error| rustls::Error::General(error.to_string()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(own.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Each connection is proved again, so that a certificate that was replaced is not used.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Some(ServerTls(Arc::new(config))))
    }

    /// Returns the settings of a client, if there is an authority.
    pub(crate) fn client(&self) -> Option<ClientTls> {
        let roots = self.roots.clone()?;
        Some(ClientTls { own: self.own.clone(), roots })
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certificates_of(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>()?;
    if all.is_empty() { Err(TlsFileError::NoCertificate) } else { Ok(all) }
}

/// The settings of a server.
#[derive(Clone, Debug)]
pub(crate) struct ServerTls(Arc<ServerConfig>);

/// The reason why there is no TLS with a peer.
#[derive(Debug, Error)]
pub(crate) enum HandshakeError {
    /// The peer speaks the protocol without TLS, and has sent this request.
    #[error("the other side speaks without TLS")]
    Plain(RequestId),
    /// The peer has ended the connection.
    #[error("the other side has ended the connection during the TLS handshake")]
    Ended,
    /// TLS has failed.
    #[error("the TLS handshake has failed")]
    Failed(#[source] io::Error),
}

impl From<HandshakeError> for io::Error {
    fn from(error: HandshakeError) -> io::Error {
        match error {
            HandshakeError::Failed(error) => error,
            error => io::Error::other(error),
        }
    }
}

impl ServerTls {
    /// Waits for the handshake of a client. Returns the stream, plain if it has failed, so that the
    /// peer can be told.
    pub(crate) async fn accept(&self, stream: Stream) -> Result<Stream, (Stream, HandshakeError)> {
        match self.connection() {
            Ok(connection) => shake_hands(stream, connection.into()).await,
            Err(error) => Err((stream, HandshakeError::Failed(io::Error::other(error)))),
        }
    }

    pub(crate) fn connection(&self) -> Result<ServerConnection, rustls::Error> {
        ServerConnection::new(self.0.clone())
    }
}

/// The settings of a client.
#[derive(Clone, Debug)]
pub(crate) struct ClientTls {
    own: Option<Arc<CertifiedKey>>,
    roots: Arc<RootCertStore>,
}

impl ClientTls {
    /// Shakes hands with a server that was reached under this host, and must be this task if one is
    /// given.
    pub(crate) async fn connect(
        &self,
        stream: Stream,
        host: &str,
        task: Option<TaskId>,
    ) -> Result<Stream, HandshakeError> {
        let connection = self.connection(host, task);
        let connection =
            connection.map_err(|error| HandshakeError::Failed(io::Error::other(error)))?;
        shake_hands(stream, connection.into()).await.map_err(|(_, error)| error)
    }

    pub(crate) fn connection(
        &self,
        host: &str,
        task: Option<TaskId>,
    ) -> Result<ClientConnection, rustls::Error> {
        let provider = provider();
        let verifier = ServerVerifier {
            roots: self.roots.clone(),
            algorithms: provider.signature_verification_algorithms,
            task,
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match &self.own {
            Some(own) => {
                builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own.clone())))
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = Resumption::disabled();
        let host = ServerName::try_from(host.to_owned())
            .map_err(|_| rustls::Error::General(format!("{host:?} is no name of a host")))?;
        ClientConnection::new(Arc::new(config), host)
    }
}

/// Shakes hands over a plain stream. Returns the stream with TLS, or plain as it was.
async fn shake_hands(
    mut stream: Stream,
    mut connection: Connection,
) -> Result<Stream, (Stream, HandshakeError)> {
    // A write bounds what it encrypts.
    connection.set_buffer_limit(None);
    stream.set_tls(TlsSession::new(connection));
    loop {
        let step = stream.handshake();
        let waited = match step {
            Ok(HandshakeStep::Done) => return Ok(stream),
            Ok(HandshakeStep::Read) => stream.ready(Interest::READABLE).await,
            Ok(HandshakeStep::Write) => stream.ready(Interest::WRITABLE).await,
            Err(error) => Err(error),
        };
        if let Err(error) = waited {
            let plain = stream.take_tls().and_then(|tls| tls.plain_request());
            let error = match (plain, error.kind()) {
                (Some(request), _) => HandshakeError::Plain(request),
                (None, io::ErrorKind::UnexpectedEof) => HandshakeError::Ended,
                (None, _) => HandshakeError::Failed(in_words(error)),
            };
            return Err((stream, error));
        }
    }
}

/// Returns an error of the handshake with the words of this crate, if it is one of its checks: TLS
/// displays the structure of such errors.
fn in_words(error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match inner {
        Some(rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(own)))) => {
            io::Error::other(own.to_string())
        }
        _ => error,
    }
}

impl TlsSession {
    /// Returns bytes that only the two ends of this connection know.
    pub(crate) fn binding(&self) -> ChannelBinding {
        self.with(|connection| connection.export_keying_material([0; 32], BINDING_LABEL, None).ok())
    }

    /// Returns the names in the certificate of the peer, which the authority has signed; `None` if it
    /// has shown none.
    pub(crate) fn peer_names(&self) -> Option<Vec<String>> {
        self.with(|connection| Some(names(connection.peer_certificates()?.first()?)))
    }
}
