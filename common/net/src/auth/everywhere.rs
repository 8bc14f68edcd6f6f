//! Credentials for all connections of a process of tests: any suite can run over TLS and with
//! tokens, although its tests name neither.

use std::path::PathBuf;
use std::sync::OnceLock;

use super::credentials::{CredentialFiles, Credentials};

/// The variable with the folder of the files: `ca.pem`, `server.pem`, `server.key` and `tokens`.
const FOLDER: &str = "PUSHPULL_TEST_CREDENTIALS";

/// Returns the credentials of a connection: its own, or in tests those of all.
pub(crate) fn in_effect(own: Option<&Credentials>) -> Option<Credentials> {
    static OF_ALL: OnceLock<Option<Credentials>> = OnceLock::new();
    if !cfg!(all(feature = "simulation", debug_assertions)) {
        return own.cloned();
    }
    let of_all = OF_ALL.get_or_init(|| {
        let folder = PathBuf::from(std::env::var_os(FOLDER)?);
        let files = CredentialFiles::new()
            .certificate(folder.join("server.pem"), folder.join("server.key"))
            .authority(folder.join("ca.pem"))
            .tokens(folder.join("tokens"));
        Some(files.open().unwrap_or_else(|error| panic!("{FOLDER}: {error:?}")))
    });
    own.or(of_all.as_ref()).cloned()
}
