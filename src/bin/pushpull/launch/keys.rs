//! [`LaunchKeys`]: what the tasks of one launch prove themselves with.

use std::error::Error;
use std::path::{Path, PathBuf};

use pushpull::security::new_secret;
use pushpull::server::enter_private_folder;

use super::super::authority::{Authority, at, replace};

/// The validity of the certificates. No launch is longer.
const DAYS: u32 = 365;

/// A directory of keys: the certificate of the authority, that of the ps tasks, and an access token
/// for the workers. Nobody keeps the key of the authority.
#[derive(Clone, Debug)]
pub(super) struct LaunchKeys {
    /// Absolute: other hosts have it at the same path.
    directory: PathBuf,
}

impl LaunchKeys {
    /// Names the directory. Nothing is created.
    ///
    /// # Errors
    /// If there is no current directory.
    pub(super) fn new(directory: &Path) -> Result<LaunchKeys, String> {
        let directory = std::path::absolute(directory).map_err(|error| at(directory, &error))?;
        Ok(LaunchKeys { directory })
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

    /// Creates the keys for ps tasks on these hosts, in place of those of an earlier launch.
    ///
    /// # Errors
    /// If the directory is not a private one of this user, or a file cannot be written.
    pub(super) fn create(&self, hosts: &[String]) -> Result<(), Box<dyn Error>> {
        enter_private_folder(&self.directory).map_err(|error| at(&self.directory, &error))?;
        let authority = Authority::new(DAYS)?;
        let key = authority.sign(&["/job:ps/task:*".to_owned()], hosts, DAYS)?;
        let token = format!(
            "token launch {} roles=worker,chief,reader,client functions=*\n",
            new_secret()?
        );
        key.write(&self.directory, "ps")?;
        replace(&self.directory.join("tokens"), &token, 0o600)?;
        replace(&self.directory.join("ca.pem"), &authority.certificate, 0o644)?;
        Ok(())
    }
}
