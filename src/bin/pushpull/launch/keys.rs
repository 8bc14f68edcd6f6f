//! [`LaunchKeys`]: the certificates and the access token of one launch.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use pushpull::security::new_secret;
use pushpull::server::enter_private_folder;
use rustix::fs::{FlockOperation, flock};

use super::super::authority::{Authority, at, replace};

/// The validity of the certificates.
const DAYS: u32 = 365;

/// The file that marks a directory of keys, and that the launcher locks while it runs.
const LOCK: &str = "launch.lock";

/// The files that the tasks need.
pub(super) const FILES: [&str; 4] = ["ca.pem", "ps.pem", "ps.key", "tokens"];

/// A directory of keys: the certificate of an authority, that of the ps tasks, and an access token
/// for the workers. Nobody keeps the key of the authority.
#[derive(Clone, Debug)]
pub(super) struct LaunchKeys {
    /// Absolute and without links above it: other hosts have it at the same path.
    directory: PathBuf,
}

impl LaunchKeys {
    /// Names the directory. Nothing is created.
    ///
    /// # Errors
    /// If there is no directory above it.
    pub(super) fn new(directory: &Path) -> Result<LaunchKeys, String> {
        let failed = |error: std::io::Error| format!("--secure {}", at(directory, &error));
        let absolute = std::path::absolute(directory).map_err(failed)?;
        let (Some(above), Some(name)) = (absolute.parent(), absolute.file_name()) else {
            return Err(format!("--secure {}: no directory has this name", directory.display()));
        };
        let above = above.canonicalize().map_err(failed)?;
        Ok(LaunchKeys { directory: above.join(name) })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the flags of a task.
    pub(super) fn flags(&self, is_ps: bool) -> Vec<String> {
        let flag = |name: &str, file| format!("--{name}={}", self.directory.join(file).display());
        let mut flags = vec![flag("tls-ca", "ca.pem"), flag("tokens", "tokens")];
        if is_ps {
            flags.extend([flag("tls-cert", "ps.pem"), flag("tls-key", "ps.key")]);
        }
        flags
    }

    /// Creates the keys for ps tasks on these hosts, in place of those of an earlier launch. The
    /// directory is taken as long as the returned file is open.
    ///
    /// # Errors
    /// If the directory is not a private one of this user, has other files, or is taken, or if a file
    /// cannot be written.
    pub(super) fn create(&self, hosts: &[String]) -> Result<File, String> {
        self.try_create(hosts).map_err(|error| format!("--secure: {error}"))
    }

    fn try_create(&self, hosts: &[String]) -> Result<File, Box<dyn Error>> {
        let directory = &self.directory;
        enter_private_folder(directory).map_err(|error| at(directory, &error))?;
        let path = directory.join(LOCK);
        // A directory of other keys, or of anything else, is not written over.
        if !path.exists() && fs::read_dir(directory)?.next().is_some() {
            let found = "it has files that are not of a launch: name a new directory";
            return Err(format!("{}: {found}", directory.display()).into());
        }
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(&path).map_err(|error| at(&path, &error))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| format!("{}: another launch uses these keys", directory.display()))?;
        let authority = Authority::new(DAYS)?;
        let key = authority.sign(&["/job:ps/task:*".to_owned()], hosts, DAYS)?;
        let token = format!(
            "token launch {} roles=worker,chief,reader,client functions=*\n",
            new_secret()?
        );
        key.write(directory, "ps")?;
        replace(&directory.join("tokens"), &token, 0o600)?;
        replace(&directory.join("ca.pem"), &authority.certificate, 0o644)?;
        Ok(lock)
    }
}
