//! `pushpull cert`: a private certificate authority in a directory, and the certificates of tasks that
//! it signs.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::authority::{Authority, at, write_new};
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
    let authority = Authority::new(options.days)?;
    // The key first: an authority that was begun without one is not taken for one.
    let key_path = directory.join("ca.key");
    write_new(&key_path, &authority.key(), 0o600)?;
    let path = directory.join("ca.pem");
    write_new(&path, &authority.certificate, 0o644)?;
    Ok(print_lines(&format!("{}\n{}", path.display(), key_path.display()))?)
}

fn new_certificate(options: &NewCertificate) -> Result<(), Box<dyn Error>> {
    let NewCertificate { directory, task, host, name, days } = options;
    let authority = Authority::read(directory)?;
    let first = task.first().or(host.first()).map_or("", String::as_str);
    let name = name.clone().unwrap_or_else(|| name_of(first));
    if name == "ca" {
        return Err("the files ca.pem and ca.key are those of the authority: give --name".into());
    }
    let [path, key_path] = authority.sign(task, host, *days)?.write(directory, &name)?;
    Ok(print_lines(&format!("{}\n{}", path.display(), key_path.display()))?)
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
