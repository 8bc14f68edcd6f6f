//! [`Credentials`]: what a process proves itself with, and whom it lets in. Its files are read again
//! when they change.

use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::ids::TaskId;
use pushpull_common::permissions::ProcessUser;
use pushpull_common::protocol::message::Role;
use thiserror::Error;
use zeroize::Zeroize;

use super::places::ConnectionPlaces;
use super::random;
use super::secret::{Secret, SecretError, SecretMemory};
use super::token_file::{AccessList, AccessListError, AccessToken};
#[cfg(feature = "tls")]
use crate::tls::{ClientTls, ServerTls, TlsFileError, TlsMaterial};

/// The files of [`Credentials`]. All are optional.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CredentialFiles {
    own: Option<(PathBuf, PathBuf)>,
    authority: Option<PathBuf>,
    tokens: Option<PathBuf>,
}

impl CredentialFiles {
    /// Names no file.
    pub fn new() -> CredentialFiles {
        CredentialFiles::default()
    }

    /// Names the certificate of this process, with those between it and the authority, and its key,
    /// both in PEM. A server with one speaks TLS only.
    #[must_use]
    pub fn certificate(
        self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> CredentialFiles {
        CredentialFiles { own: Some((certificate.into(), key.into())), ..self }
    }

    /// Names the certificates of the authority in PEM: it has signed those of the others. A client
    /// with them speaks TLS only.
    #[must_use]
    pub fn authority(self, certificates: impl Into<PathBuf>) -> CredentialFiles {
        CredentialFiles { authority: Some(certificates.into()), ..self }
    }

    /// Names the file of access tokens (`docs/security.md`). A server lets in whom it names. A client
    /// uses the first token in it that suits its role and its task.
    #[must_use]
    pub fn tokens(self, tokens: impl Into<PathBuf>) -> CredentialFiles {
        CredentialFiles { tokens: Some(tokens.into()), ..self }
    }

    /// Returns whether no file is named.
    pub fn is_empty(&self) -> bool {
        *self == CredentialFiles::default()
    }

    /// Reads the files.
    ///
    /// # Errors
    /// Every [`CredentialsError`].
    pub fn open(self) -> Result<Credentials, CredentialsError> {
        let (loaded, stamps) = self.read()?;
        Credentials::new(self, loaded, stamps)
    }

    fn paths(&self) -> impl Iterator<Item = &Path> {
        let own = self.own.iter().flat_map(|(certificate, key)| [certificate, key]);
        own.chain(&self.authority).chain(&self.tokens).map(PathBuf::as_path)
    }

    fn read(&self) -> Result<(Loaded, Vec<FileStamp>), CredentialsError> {
        let mut stamps = Vec::new();
        let mut read = |path: &Path, secrecy| {
            let (bytes, stamp) = read_file(path, secrecy)?;
            stamps.push(stamp);
            Ok::<_, CredentialsError>(bytes)
        };
        #[cfg(not(feature = "tls"))]
        if let Some(path) = self.own.iter().map(|(own, _)| own).chain(&self.authority).next() {
            return Err(CredentialsError::WithoutTls { path: path.clone() });
        }
        #[cfg(feature = "tls")]
        let tls = {
            let mut material = TlsMaterial::default();
            if let Some((path, key_path)) = &self.own {
                let certificate = read(path, Secrecy::Public)?;
                let key = read(key_path, Secrecy::Secret)?;
                let own = material.set_own(certificate.bytes(), key.bytes());
                own.map_err(|source| CredentialsError::Tls { path: path.clone(), source })?;
            }
            if let Some(path) = &self.authority {
                let authority = material.set_authority(read(path, Secrecy::Public)?.bytes());
                authority.map_err(|source| CredentialsError::Tls { path: path.clone(), source })?;
            }
            let server = material.server().map_err(|source| {
                let path = self.own.as_ref().map(|(path, _)| path.clone()).unwrap_or_default();
                CredentialsError::Tls { path, source }
            })?;
            LoadedTls { server, client: material.client() }
        };
        let list = match &self.tokens {
            None => None,
            Some(path) => {
                let memory = read(path, Secrecy::Secret)?;
                let fault = |source| CredentialsError::Tokens { path: path.clone(), source };
                let text = std::str::from_utf8(memory.bytes())
                    .map_err(|_| CredentialsError::NoText { path: path.clone() })?;
                Some(Arc::new(AccessList::parse(text).map_err(fault)?))
            }
        };
        let loaded = Loaded {
            list,
            #[cfg(feature = "tls")]
            tls,
        };
        Ok((loaded, stamps))
    }
}

/// The credentials of a process: a certificate, an authority and access tokens, with which it proves
/// who it is and decides whom it lets in.
///
/// Its files are checked when it is used, a few times a second at most, so that a token or a
/// certificate can be replaced while servers and workers run. If they have become unusable, what
/// they said before holds.
#[derive(Clone)]
pub struct Credentials(Arc<Shared>);

struct Shared {
    files: CredentialFiles,
    /// The secret of tokens that do not exist.
    decoys: Secret,
    places: ConnectionPlaces,
    /// Locked for no longer than a clone takes: no file is read under it.
    current: Mutex<Arc<Loaded>>,
    watched: Mutex<Watched>,
}

struct Watched {
    stamps: Vec<FileStamp>,
    looked: Instant,
    /// The fault for which the files that are there now are not used.
    problem: Option<Arc<CredentialsError>>,
}

/// What the files say.
pub(crate) struct Loaded {
    pub(crate) list: Option<Arc<AccessList>>,
    #[cfg(feature = "tls")]
    pub(crate) tls: LoadedTls,
}

/// The settings of TLS on both sides.
#[cfg(feature = "tls")]
pub(crate) struct LoadedTls {
    pub(crate) server: Option<ServerTls>,
    pub(crate) client: Option<ClientTls>,
}

/// The time between two looks at the files.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

impl Credentials {
    /// Generates an access token that is in no file and may do everything. Servers with a clone of it
    /// admit clients with a clone alone, and on Unix sockets processes of the same user.
    ///
    /// It closes a cluster on loopback to the other users of the machine. It does not encrypt.
    ///
    /// # Errors
    /// [`CredentialsError::System`].
    pub fn generated() -> Result<Credentials, CredentialsError> {
        let list = Some(Arc::new(AccessList::of_one("generated", random_secret()?)));
        let loaded = Loaded {
            list,
            #[cfg(feature = "tls")]
            tls: LoadedTls { server: None, client: None },
        };
        Credentials::new(CredentialFiles::new(), loaded, Vec::new())
    }

    fn new(
        files: CredentialFiles,
        loaded: Loaded,
        stamps: Vec<FileStamp>,
    ) -> Result<Credentials, CredentialsError> {
        let decoys = random_secret()?;
        let watched = Mutex::new(Watched { stamps, looked: Instant::now(), problem: None });
        let places = ConnectionPlaces::default();
        let current = Mutex::new(Arc::new(loaded));
        Ok(Credentials(Arc::new(Shared { files, decoys, places, current, watched })))
    }

    /// Returns whether a server with these lets in only those who prove who they are.
    pub fn identify_clients(&self) -> bool {
        let CredentialFiles { own, authority, .. } = &self.0.files;
        self.current().list.is_some() || own.is_some() && authority.is_some()
    }

    /// Returns whether a server with these encrypts.
    pub fn encrypt(&self) -> bool {
        self.0.files.own.is_some()
    }

    /// Returns whether a server with these may be reached by other machines: it encrypts, and lets in
    /// only those who prove who they are.
    pub fn protect(&self) -> bool {
        self.encrypt() && self.identify_clients()
    }

    /// Returns those of two that protect a server which other machines reach, or else the first.
    #[must_use]
    pub fn stronger(
        first: Option<Credentials>,
        second: Option<Credentials>,
    ) -> Option<Credentials> {
        let protects = |of: &Option<Credentials>| of.as_ref().is_some_and(Credentials::protect);
        if protects(&second) && !protects(&first) { second } else { first.or(second) }
    }

    /// Returns why the files that are there now are not used, if they became unusable.
    pub fn problem(&self) -> Option<Arc<CredentialsError>> {
        self.fresh();
        self.watched().problem.clone()
    }

    /// Returns the token by which this task connects in a role.
    pub fn own_token(&self, role: Role, task: &TaskId) -> Option<Arc<AccessToken>> {
        self.fresh().list.as_ref()?.own_token(role, task).cloned()
    }

    /// Returns the secret of tokens that do not exist.
    pub(crate) fn decoys(&self) -> &Secret {
        &self.0.decoys
    }

    /// Returns the connections that principals have to servers with these.
    pub(crate) fn places(&self) -> &ConnectionPlaces {
        &self.0.places
    }

    /// Returns the credentials of the last reading. Reads no file.
    pub(crate) fn current(&self) -> Arc<Loaded> {
        // It is valid after each step.
        self.0.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns what the files say now. Looks at them a few times a second at most.
    pub(crate) fn fresh(&self) -> Arc<Loaded> {
        let mut watched = self.watched();
        if watched.looked.elapsed() >= LOOK_INTERVAL {
            watched.looked = Instant::now();
            let stamps: Option<Vec<FileStamp>> = self.0.files.paths().map(FileStamp::of).collect();
            if stamps.as_ref() != Some(&watched.stamps) {
                self.read_again(&mut watched);
            }
        }
        drop(watched);
        self.current()
    }

    fn read_again(&self, watched: &mut Watched) {
        match self.0.files.read() {
            Ok((loaded, stamps)) => {
                let mut current = self.0.current.lock().unwrap_or_else(PoisonError::into_inner);
                *current = Arc::new(loaded);
                watched.stamps = stamps;
                watched.problem = None;
            }
            // A file may be written this very moment, so the next look reads again.
            Err(error) => watched.problem = Some(Arc::new(error)),
        }
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        // It is valid after each step.
        self.0.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Credentials").field(&self.0.files).finish()
    }
}

impl PartialEq for Credentials {
    fn eq(&self, other: &Credentials) -> bool {
        let files = &self.0.files;
        Arc::ptr_eq(&self.0, &other.0) || !files.is_empty() && *files == other.0.files
    }
}

impl Eq for Credentials {}

/// The reason why credentials cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Others than this user can read a secret file.
    #[error("cannot use {path}: {found}, so its secrets are none; chmod 600 it")]
    Readable {
        /// The file.
        path: PathBuf,
        /// Who can read it.
        found: String,
    },
    /// A file is far larger than one of its kind.
    #[error("cannot use {path}: it is larger than {} bytes", FILE_BYTES_MAX)]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file of tokens is no text.
    #[error("cannot use {path}: it is no UTF-8")]
    NoText {
        /// The file.
        path: PathBuf,
    },
    /// The file of tokens has a fault.
    #[error("cannot use {path}")]
    Tokens {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: AccessListError,
    },
    /// A file of certificates or keys has a fault.
    #[cfg(feature = "tls")]
    #[error("cannot use {path}")]
    Tls {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: TlsFileError,
    },
    /// The program was built without TLS.
    #[error("cannot use {path}: this program was built without TLS (feature \"tls\")")]
    WithoutTls {
        /// The file.
        path: PathBuf,
    },
    /// The system gives no random bytes, or no memory for secrets.
    #[error("cannot keep secrets")]
    System {
        /// The error of the operating system.
        #[from]
        source: io::Error,
    },
}

impl CredentialsError {
    /// Returns the file with the fault.
    pub fn path(&self) -> Option<&Path> {
        match self {
            CredentialsError::Read { path, .. }
            | CredentialsError::Readable { path, .. }
            | CredentialsError::TooLarge { path }
            | CredentialsError::NoText { path }
            | CredentialsError::Tokens { path, .. }
            | CredentialsError::WithoutTls { path } => Some(path),
            #[cfg(feature = "tls")]
            CredentialsError::Tls { path, .. } => Some(path),
            CredentialsError::System { .. } => None,
        }
    }

    fn of_secret(error: SecretError) -> CredentialsError {
        CredentialsError::System { source: io::Error::other(error) }
    }
}

fn random_secret() -> Result<Secret, CredentialsError> {
    let mut bytes = random()?;
    let secret = Secret::from_random(&bytes).map_err(CredentialsError::of_secret);
    bytes.zeroize();
    secret
}

/// The most bytes of a file: thousands of tokens or certificates.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Secrecy {
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "certificates are public"))]
    Public,
    /// Others must not be able to read it.
    Secret,
}

/// Reads a file into memory that no core dump has.
fn read_file(path: &Path, secrecy: Secrecy) -> Result<(SecretMemory, FileStamp), CredentialsError> {
    let failed = |source| CredentialsError::Read { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::other("it is no plain file")));
    }
    if secrecy == Secrecy::Secret
        && let Some(found) = readers(&metadata, &process_user())
    {
        return Err(CredentialsError::Readable { path: path.to_owned(), found });
    }
    if metadata.len() > FILE_BYTES_MAX {
        return Err(CredentialsError::TooLarge { path: path.to_owned() });
    }
    let mut memory = SecretMemory::new(metadata.len() as usize).map_err(failed)?;
    file.read_exact(memory.bytes_mut()).map_err(failed)?;
    Ok((memory, FileStamp::from(&metadata)))
}

/// Returns who else can read a file, in words. A file of root may be read by a group of this process:
/// Kubernetes mounts secrets like this.
fn readers(metadata: &Metadata, process: &ProcessUser) -> Option<String> {
    let mode = metadata.mode() & 0o777;
    let owner = metadata.uid();
    let is_mounted = owner == 0 && process.groups.contains(&metadata.gid());
    let others = if is_mounted { 0o007 } else { 0o077 };
    if mode & others != 0 {
        return Some(format!("its mode {mode:o} lets others read it"));
    }
    (owner != process.user && !is_mounted && owner != 0)
        .then(|| format!("it belongs to user {owner}"))
}

fn process_user() -> ProcessUser {
    let mut groups = vec![rustix::process::getegid().as_raw()];
    groups.extend(rustix::process::getgroups().iter().flatten().map(|group| group.as_raw()));
    ProcessUser { user: rustix::process::geteuid().as_raw(), groups }
}

/// What tells one state of a file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
    file: (u64, u64),
    bytes: u64,
    changed: (i64, i64),
}

impl FileStamp {
    fn of(path: &Path) -> Option<FileStamp> {
        path.metadata().ok().as_ref().map(FileStamp::from)
    }
}

impl From<&Metadata> for FileStamp {
    fn from(metadata: &Metadata) -> FileStamp {
        FileStamp {
            file: (metadata.dev(), metadata.ino()),
            bytes: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}
