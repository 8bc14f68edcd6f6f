//! Keys for one measurement over TLS: those of a server and its workers, and rustls alone between two
//! sockets.

use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pushpull::security::{CredentialFiles, Credentials, new_secret};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};

use super::ceiling::DuplexStream;
use super::{BenchError, BenchFolder};

/// The host that the certificate names.
const HOST: &str = "127.0.0.1";

/// The ends of a connection: the client's and the server's.
type StreamEnds = (Box<dyn DuplexStream>, Box<dyn DuplexStream>);

/// An authority, a certificate and a token, each of which is thrown away.
pub(crate) struct BenchKeys {
    folder: BenchFolder,
}

impl BenchKeys {
    /// Creates them in a private folder.
    pub(crate) fn new(what: &str) -> Result<BenchKeys, BenchError> {
        let folder = BenchFolder::private(&format!("keys-{what}"))?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.distinguished_name.push(DnType::CommonName, "a measurement");
        let authority = params.self_signed(&key)?;
        let issuer = Issuer::new(params, key);
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.subject_alt_names.push(SanType::IpAddress(HOST.parse()?));
        let certificate = params.signed_by(&key, &issuer)?;
        let token = format!("token bench {} roles=worker,chief,reader", new_secret()?);
        for (name, text) in [
            ("ca.pem", authority.pem()),
            ("server.pem", certificate.pem()),
            ("server.key", key.serialize_pem()),
            ("tokens", token),
        ] {
            let path = folder.path().join(name);
            fs::write(&path, text)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        }
        Ok(BenchKeys { folder })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the credentials of the server and of its workers.
    pub(crate) fn credentials(&self) -> Result<Credentials, BenchError> {
        let path = self.path();
        let files = CredentialFiles::new().authority(path.join("ca.pem"));
        let files = files.certificate(path.join("server.pem"), path.join("server.key"));
        Ok(files.tokens(path.join("tokens")).open()?)
    }

    /// Puts TLS 1.3 over both ends of a connection, as rustls does it alone.
    fn secure(&self, client: TcpStream, server: TcpStream) -> Result<StreamEnds, BenchError> {
        let provider = Arc::new(ring::default_provider());
        let chain = vec![CertificateDer::from_pem_file(self.path().join("server.pem"))?];
        let key = PrivateKeyDer::from_pem_file(self.path().join("server.key"))?;
        let config = ServerConfig::builder_with_provider(provider.clone());
        let config = config.with_protocol_versions(&[&TLS13])?.with_no_client_auth();
        let config = Arc::new(config.with_single_cert(chain, key)?);
        let serving = ServerConnection::new(config)?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path().join("ca.pem"))?)?;
        let config = ClientConfig::builder_with_provider(provider);
        let config = config.with_protocol_versions(&[&TLS13])?.with_root_certificates(roots);
        let config = Arc::new(config.with_no_client_auth());
        let connecting = ClientConnection::new(config, HOST.try_into()?)?;
        let server = StreamOwned::new(serving, server);
        Ok((Box::new(StreamOwned::new(connecting, client)), Box::new(server)))
    }
}

/// Returns the two ends of a connection, over which rustls alone speaks TLS.
pub(crate) fn tls_pair(client: TcpStream, server: TcpStream) -> std::io::Result<StreamEnds> {
    let secured = BenchKeys::new("alone").and_then(|keys| keys.secure(client, server));
    secured.map_err(|error| std::io::Error::other(error.to_string()))
}

/// A ping-pong of 64 bytes between two threads that block, over rustls alone.
pub(crate) struct TlsPingPong {
    stream: Option<Box<dyn DuplexStream>>,
    server: Option<std::thread::JoinHandle<()>>,
}

impl TlsPingPong {
    pub(crate) const NAME: &str = "pingpong_rustls";

    pub(crate) fn start(client: TcpStream, server: TcpStream) -> std::io::Result<TlsPingPong> {
        let (client, mut server) = tls_pair(client, server)?;
        let server = std::thread::spawn(move || {
            let mut message = [0; 64];
            // A failure here reaches the other end, which gets no answer.
            while server.read_exact(&mut message).is_ok() && server.write_all(&message).is_ok() {}
        });
        Ok(TlsPingPong { stream: Some(client), server: Some(server) })
    }

    pub(crate) fn once(&mut self) -> std::io::Result<Duration> {
        let Some(stream) = &mut self.stream else { return Ok(Duration::ZERO) };
        let start = Instant::now();
        let mut message = [0; 64];
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
        Ok(start.elapsed())
    }
}

impl Drop for TlsPingPong {
    fn drop(&mut self) {
        self.stream = None;
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}
