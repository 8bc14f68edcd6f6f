//! [`Authority`]: a private certificate authority, and the certificates of tasks that it signs.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pushpull::security::new_secret;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};

/// A private certificate authority.
pub(crate) struct Authority {
    /// Its certificate, PEM behind a line with its name.
    pub(crate) certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, both PEM.
pub(crate) struct SignedKey {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    /// Creates an authority with a name and a key of its own.
    pub(crate) fn new(days: u32) -> Result<Authority, Box<dyn Error>> {
        let name = format!("pushpull authority {}", &new_secret()?[..16]);
        let key = KeyPair::generate()?;
        let mut params = authority_params(&name);
        (params.not_before, params.not_after) = validity(days);
        let certificate = format!("{NAME_LINE}{name}\n{}", params.self_signed(&key)?.pem());
        Ok(Authority { certificate, issuer: Issuer::new(params, key) })
    }

    /// Reads the authority of a directory: `ca.pem` and `ca.key`.
    pub(crate) fn read(directory: &Path) -> Result<Authority, Box<dyn Error>> {
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read_to_string(&path).map_err(|error| match error.kind() {
                ErrorKind::NotFound => {
                    format!(
                        "{}: there is no authority; create one by pushpull cert new-ca",
                        path.display()
                    )
                }
                _ => at(&path, &error),
            })
        };
        let (certificate, key) = (read("ca.pem")?, read("ca.key")?);
        let name = certificate.lines().next().and_then(|line| line.strip_prefix(NAME_LINE));
        let Some(name) = name else {
            let path = directory.join("ca.pem");
            return Err(format!("{}: no authority of pushpull cert new-ca", path.display()).into());
        };
        let key = KeyPair::from_pem(&key)
            .map_err(|error| format!("{}: {error}", directory.join("ca.key").display()))?;
        let issuer = Issuer::new(authority_params(name), key);
        Ok(Authority { certificate, issuer })
    }

    /// Returns the key of the authority, PEM.
    pub(crate) fn key(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Signs a certificate for tasks, such as `/job:ps/task:0`, and for hosts, each a name or an
    /// address. It serves on both sides of a connection.
    pub(crate) fn sign(
        &self,
        tasks: &[String],
        hosts: &[String],
        days: u32,
    ) -> Result<SignedKey, Box<dyn Error>> {
        let mut params = CertificateParams::default();
        for task in tasks {
            params.subject_alt_names.push(SanType::URI(task.as_str().try_into()?));
        }
        for host in hosts {
            params.subject_alt_names.push(match host.parse() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => {
                    let name = host.as_str().try_into();
                    SanType::DnsName(name.map_err(|error| format!("host {host}: {error}"))?)
                }
            });
        }
        let first = tasks.first().or(hosts.first()).map_or("", String::as_str);
        params.distinguished_name.push(DnType::CommonName, first);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        (params.not_before, params.not_after) = validity(days);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?.pem();
        Ok(SignedKey { certificate, key: key.serialize_pem() })
    }
}

impl SignedKey {
    /// Writes `NAME.pem` and `NAME.key`, in place of those that are there. Returns their paths.
    pub(crate) fn write(&self, directory: &Path, name: &str) -> Result<[PathBuf; 2], String> {
        let path = directory.join(format!("{name}.pem"));
        let key_path = directory.join(format!("{name}.key"));
        // Processes that use the files read both again when they change. Between the two renames a
        // key does not match, and they keep what they have.
        replace(&key_path, &self.key, 0o600)?;
        replace(&path, &self.certificate, 0o644)?;
        Ok([path, key_path])
    }
}

/// The line of `ca.pem` that has the name of the authority.
const NAME_LINE: &str = "# ";

fn authority_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// Returns the begin and the end of a number of days from now. Clocks of other hosts may be an hour
/// behind.
fn validity(days: u32) -> (time::OffsetDateTime, time::OffsetDateTime) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at = |since: Duration| date_time_ymd(1970, 1, 1) + since;
    let end = now + Duration::from_secs(86_400 * u64::from(days));
    (at(now.saturating_sub(Duration::from_secs(3600))), at(end))
}

/// Returns an error of a file as text.
pub(crate) fn at(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Writes a file that must not exist.
pub(crate) fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), String> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| at(path, &error))
}

/// Writes a file, in place of the one that is there.
pub(crate) fn replace(path: &Path, text: &str, mode: u32) -> Result<(), String> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    let draft = PathBuf::from(draft);
    // Of a command that was killed.
    let _ = fs::remove_file(&draft);
    write_new(&draft, text, mode)?;
    fs::rename(&draft, path).map_err(|error| at(path, &error))
}
