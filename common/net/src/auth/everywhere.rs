//! Credentials for all connections of a process of tests: any suite can run over TLS and with
//! tokens, although its tests name neither.

#[cfg(all(feature = "simulation", debug_assertions))]
use std::{path::PathBuf, sync::OnceLock};

#[cfg(all(feature = "simulation", debug_assertions))]
use super::credentials::CredentialFiles;
use super::credentials::Credentials;

/// The variable with the folder of the files: `ca.pem`, `server.pem`, `server.key` and `tokens`.
#[cfg(all(feature = "simulation", debug_assertions))]
const FOLDER: &str = "PUSHPULL_TEST_CREDENTIALS";

/// Returns the credentials of a connection: its own, or those of all in a process of tests.
#[cfg(all(feature = "simulation", debug_assertions))]
pub(crate) fn in_effect(own: Option<&Credentials>) -> Option<Credentials> {
    static OF_ALL: OnceLock<Option<Credentials>> = OnceLock::new();
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

/// Returns the credentials of a connection.
#[cfg(not(all(feature = "simulation", debug_assertions)))]
pub(crate) fn in_effect(own: Option<&Credentials>) -> Option<Credentials> {
    own.cloned()
}
