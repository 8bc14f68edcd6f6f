//! [`SecurityOptions`]: what this process proves itself with, and whom it lets in.

use std::path::PathBuf;

use clap::Args;
use pushpull::TaskId;
use pushpull::error::Chain;
use pushpull::security::{CredentialFiles, Credentials};

use super::local_path::local_path;

/// The files of credentials. `{job}` and `{task}` in their paths stand for the job and the index of
/// the task.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Security")]
pub(crate) struct SecurityOptions {
    /// Certificate of this task, PEM; a server then speaks TLS only
    #[arg(long, value_name = "FILE", requires = "tls_key", value_parser = local_path())]
    tls_cert: Option<PathBuf>,
    /// Key of the certificate, PEM, which only this user can read
    #[arg(long, value_name = "FILE", requires = "tls_cert", value_parser = local_path())]
    tls_key: Option<PathBuf>,
    /// Authority that has signed the certificates of the others, PEM
    #[arg(long, value_name = "FILE", value_parser = local_path())]
    tls_ca: Option<PathBuf>,
    /// Access tokens, which only this user can read: those to let in, and that of this task
    #[arg(long, value_name = "FILE", value_parser = local_path())]
    tokens: Option<PathBuf>,
}

impl SecurityOptions {
    /// Returns the credentials of a task; `None` without any flag.
    ///
    /// # Errors
    /// If a file cannot be used. The error names the flag.
    pub(crate) fn credentials(&self, task: &TaskId) -> Result<Option<Credentials>, String> {
        let own = |path: &PathBuf| path_of(path, task);
        let mut files = CredentialFiles::new();
        if let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) {
            files = files.certificate(own(certificate), own(key));
        }
        if let Some(authority) = &self.tls_ca {
            files = files.authority(own(authority));
        }
        if let Some(tokens) = &self.tokens {
            files = files.tokens(own(tokens));
        }
        if files.is_empty() {
            return Ok(None);
        }
        files.open().map(Some).map_err(|error| {
            let flags = [
                ("--tls-cert", &self.tls_cert),
                ("--tls-key", &self.tls_key),
                ("--tls-ca", &self.tls_ca),
                ("--tokens", &self.tokens),
            ];
            let is_at_fault = |path: &PathBuf| error.path() == Some(&own(path));
            let found = flags.iter().find_map(|(flag, path)| {
                let path = path.as_ref().filter(|path| is_at_fault(path))?;
                Some(format!("{flag} {}: {}", path.display(), Chain(&error)))
            });
            found.unwrap_or_else(|| Chain(&error).to_string())
        })
    }
}

/// Returns the path of a task.
fn path_of(path: &std::path::Path, task: &TaskId) -> PathBuf {
    let text = path.to_string_lossy();
    match text.contains('{') {
        true => text.replace("{job}", &task.job).replace("{task}", &task.index.to_string()).into(),
        false => path.to_owned(),
    }
}
