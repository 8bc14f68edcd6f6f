//! `pushpull cert`: a private certificate authority in a directory, and the certificates of tasks that
//! it signs.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use pushpull::security::new_secret;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};

use super::options::local_path;
use super::output::print_lines;

/// Commands of `pushpull cert`.
#[derive(Debug, Subcommand)]
pub(crate) enum CertCommand {
    /// Create a certificate authority: ca.pem, which all tasks get, and ca.key, which none gets.
    NewCa(NewAuthority),
    /// Sign a certificate: NAME.pem and NAME.key, for one task or several.
    New(NewCertificate),
}

/// Options of `pushpull cert new-ca`.
#[derive(Debug, Args)]
pub(crate) struct NewAuthority {
    /// Directory of the authority; created if there is none
    #[arg(value_name = "DIR", value_parser = local_path())]
    directory: PathBuf,
    /// Days for which the authority is valid
    #[arg(long, help_heading = "Certificate", value_name = "N", default_value_t = 3650, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
}

/// Options of `pushpull cert new`.
#[derive(Debug, Args)]
pub(crate) struct NewCertificate {
    /// Directory of the authority
    #[arg(value_name = "DIR", value_parser = local_path())]
    directory: PathBuf,
    /// Task that the certificate names, such as /job:ps/task:0; task:* stands for all of a job
    #[arg(long, help_heading = "Certificate", value_name = "TASK", required_unless_present = "host", value_parser = task_name)]
    task: Vec<String>,
    /// Host that it names, a name or an address, for clients that do not know the task
    #[arg(long, help_heading = "Certificate", value_name = "HOST")]
    host: Vec<String>,
    /// Name of the files [default: that of the first task, such as ps-0, or of the host]
    #[arg(long, help_heading = "Certificate", value_name = "NAME", value_parser = file_name)]
    name: Option<String>,
    /// Days for which the certificate is valid
    #[arg(long, help_heading = "Certificate", value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500))]
    days: u32,
}

/// Runs a command.
pub(crate) fn run(command: &CertCommand) -> Result<(), Box<dyn Error>> {
    match command {
        CertCommand::NewCa(options) => new_authority(options),
        CertCommand::New(options) => new_certificate(options),
    }
}

fn new_authority(options: &NewAuthority) -> Result<(), Box<dyn Error>> {
    let directory = &options.directory;
    fs::create_dir_all(directory).map_err(|error| at(directory, &error))?;
    let name = format!("pushpull authority {}", &new_secret()?[..16]);
    let key = KeyPair::generate()?;
    let mut params = authority_params(&name);
    (params.not_before, params.not_after) = validity(options.days);
    let certificate = params.self_signed(&key)?;
    // The key first: an authority that was begun without one is not taken for one.
    let key_path = directory.join("ca.key");
    write_new(&key_path, &key.serialize_pem(), 0o600)?;
    let path = directory.join("ca.pem");
    write_new(&path, &format!("{NAME_LINE}{name}\n{}", certificate.pem()), 0o644)?;
    Ok(print_lines(&format!("{}\n{}", path.display(), key_path.display()))?)
}

fn new_certificate(options: &NewCertificate) -> Result<(), Box<dyn Error>> {
    let directory = &options.directory;
    let issuer = read_authority(directory)?;
    let mut params = CertificateParams::default();
    for task in &options.task {
        params.subject_alt_names.push(SanType::URI(task.as_str().try_into()?));
    }
    for host in &options.host {
        params.subject_alt_names.push(match host.parse() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => {
                let name = host.as_str().try_into();
                SanType::DnsName(name.map_err(|error| format!("--host {host}: {error}"))?)
            }
        });
    }
    let first = options.task.first().or(options.host.first()).map_or("", String::as_str);
    params.distinguished_name.push(DnType::CommonName, first);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    (params.not_before, params.not_after) = validity(options.days);
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    let name = options.name.clone().unwrap_or_else(|| name_of(first));
    if name == "ca" {
        return Err("the files ca.pem and ca.key are those of the authority: give --name".into());
    }
    let path = directory.join(format!("{name}.pem"));
    let key_path = directory.join(format!("{name}.key"));
    // Processes that use the files read both again when they change. Between the two renames a key
    // does not match, and they keep what they have.
    replace(&key_path, &key.serialize_pem(), 0o600)?;
    replace(&path, &certificate.pem(), 0o644)?;
    Ok(print_lines(&format!("{}\n{}", path.display(), key_path.display()))?)
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

/// Reads what signs certificates from the directory of an authority.
fn read_authority(directory: &Path) -> Result<Issuer<'static, KeyPair>, Box<dyn Error>> {
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
    Ok(Issuer::new(authority_params(name), key))
}

/// Returns the begin and the end of a number of days from now. Clocks of other hosts may be an hour
/// behind.
fn validity(days: u32) -> (time::OffsetDateTime, time::OffsetDateTime) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at = |since: Duration| date_time_ymd(1970, 1, 1) + since;
    let end = now + Duration::from_secs(86_400 * u64::from(days));
    (at(now.saturating_sub(Duration::from_secs(3600))), at(end))
}

/// Returns the name of the files of a task or a host.
fn name_of(first: &str) -> String {
    let task = first.strip_prefix("/job:").and_then(|rest| rest.split_once("/task:"));
    match task {
        Some((job, "*")) => job.to_owned(),
        Some((job, index)) => format!("{job}-{index}"),
        None => first.to_owned(),
    }
}

fn task_name(text: &str) -> Result<String, String> {
    let task = text.strip_prefix("/job:").and_then(|rest| rest.split_once("/task:"));
    let is_job = |job: &str| {
        !job.is_empty()
            && job.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
    };
    match task {
        Some((job, index)) if is_job(job) && (index == "*" || index.parse::<u32>().is_ok()) => {
            Ok(text.to_owned())
        }
        _ => Err("expected a task, such as /job:ps/task:0 or /job:worker/task:*".to_owned()),
    }
}

fn file_name(text: &str) -> Result<String, String> {
    match text.is_empty() || text.starts_with('.') || text.contains('/') {
        true => Err("expected the name of a file, without its end".to_owned()),
        false => Ok(text.to_owned()),
    }
}

fn at(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Writes a file that must not exist.
fn write_new(path: &Path, text: &str, mode: u32) -> Result<(), String> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| at(path, &error))
}

/// Writes a file, in place of the one that is there.
fn replace(path: &Path, text: &str, mode: u32) -> Result<(), String> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    let draft = PathBuf::from(draft);
    // Of a command that was killed.
    let _ = fs::remove_file(&draft);
    write_new(&draft, text, mode)?;
    fs::rename(&draft, path).map_err(|error| at(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_by_what_they_prove() {
        for (first, name) in [
            ("/job:ps/task:0", "ps-0"),
            ("/job:worker/task:*", "worker"),
            ("ps-0.example.org", "ps-0.example.org"),
        ] {
            assert_eq!(name_of(first), name);
        }
    }

    #[test]
    fn tasks_are_written_as_clusters_write_them() {
        for text in ["/job:ps/task:0", "/job:worker/task:*", "/job:a-b.c_d/task:4294967295"] {
            assert_eq!(task_name(text).as_deref(), Ok(text));
        }
        for text in
            ["ps:0", "/job:ps", "/job:/task:0", "/job:ps/task:", "/job:ps/task:1*", "/job:*/task:0"]
        {
            assert!(task_name(text).is_err(), "{text}");
        }
    }
}
