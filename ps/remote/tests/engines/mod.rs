//! Stores that the tests start on loopback: moto for S3, Azurite for Azure, a NameNode and a DataNode
//! for HDFS. Each is skipped, with a printed line, unless an environment variable names its program.

#![allow(dead_code, reason = "each test uses a part")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::{CheckpointStorage, RemoteOptions, RemoteStorage};

/// A store under test.
pub(crate) struct Engine {
    /// The URL of its bucket, container or root.
    pub(crate) url: String,
    /// The settings of a client.
    pub(crate) settings: Vec<(&'static str, String)>,
    /// The processes, the last of which is stopped first.
    processes: Vec<Child>,
    hadoop: Option<Hadoop>,
    directory: TempDir,
}

/// The longest time that an engine takes to start on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(120);

impl Engine {
    /// Returns the options of a client.
    pub(crate) fn options(&self) -> RemoteOptions {
        let settings = self.settings.iter();
        settings.fold(RemoteOptions::new(), |options, (name, value)| options.value(*name, value))
    }

    /// Opens the storage of a path.
    pub(crate) fn open(&self, path: &str) -> RemoteStorage {
        RemoteStorage::open(&format!("{}/{path}", self.url), self.options()).unwrap()
    }

    /// Starts all engines that are installed.
    pub(crate) fn all() -> impl Iterator<Item = Engine> {
        let starts: [fn() -> Option<Engine>; 3] = [Engine::moto, Engine::azurite, Engine::hdfs];
        starts.into_iter().filter_map(|start| start())
    }

    /// Starts moto, a server of S3, with the bucket `ckpt`.
    pub(crate) fn moto() -> Option<Engine> {
        let program = installed("PUSHPULL_MOTO", "moto_server")?;
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut moto = Command::new(program);
        moto.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        let processes = vec![start(&mut moto, directory.path(), "moto")];
        wait_until("moto", || send(port, "PUT", "/ckpt", MOTO_AUTHORIZATION, b"") == Some(200));
        let settings = vec![
            ("AWS_ACCESS_KEY_ID", "test".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
        ];
        let url = "s3://ckpt".to_owned();
        Some(Engine { url, settings, processes, hadoop: None, directory })
    }

    /// Stores an object in the bucket of moto, which checks no signature.
    pub(crate) fn put_object(&self, key: &str, bytes: &[u8]) {
        let endpoint = self.settings.iter().find(|(name, _)| *name == "AWS_ENDPOINT_URL");
        let port = endpoint.and_then(|(_, url)| url.rsplit(':').next()?.parse().ok()).unwrap();
        let status = send(port, "PUT", &format!("/ckpt/{key}"), MOTO_AUTHORIZATION, bytes);
        assert_eq!(status, Some(200), "{key}");
    }

    /// Starts Azurite, an emulator of Azure Blob Storage, with the container `ckpt`.
    pub(crate) fn azurite() -> Option<Engine> {
        let program = installed("PUSHPULL_AZURITE", "azurite-blob")?;
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut azurite = Command::new(program);
        azurite.args(["--blobHost", "127.0.0.1", "--blobPort", &port.to_string()]);
        // It would try to reach its makers otherwise.
        azurite.args(["--disableTelemetry", "--skipApiVersionCheck", "--silent"]);
        azurite.arg("--inMemoryPersistence").current_dir(directory.path());
        let processes = vec![start(&mut azurite, directory.path(), "azurite")];
        wait_until("azurite", || create_container(port) == Some(201));
        let settings = vec![
            ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT.to_owned()),
            ("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY.to_owned()),
            ("AZURE_STORAGE_ENDPOINT", format!("http://127.0.0.1:{port}/{ACCOUNT}")),
            ("AZURE_ALLOW_HTTP", "true".to_owned()),
        ];
        let url = "az://ckpt".to_owned();
        Some(Engine { url, settings, processes, hadoop: None, directory })
    }

    /// Starts a NameNode and a DataNode of HDFS.
    pub(crate) fn hdfs() -> Option<Engine> {
        let jars = installed("PUSHPULL_HDFS_JARS", "a directory with the jars of HDFS")?;
        let directory = tempfile::tempdir().unwrap();
        let hadoop = Hadoop::configure(&jars, directory.path());
        let formatted = hadoop.command(NAME_NODE, &["-format", "-nonInteractive", "-force"]);
        let status = wait_for(start_command(formatted, directory.path(), "format"));
        assert!(status, "the NameNode is not formatted: {}", log(directory.path(), "format"));
        let url = format!("hdfs://127.0.0.1:{}", hadoop.name_node_port);
        let mut engine = Engine {
            url,
            settings: vec![("HADOOP_USER_NAME", "pushpull".to_owned())],
            processes: Vec::new(),
            hadoop: Some(hadoop),
            directory,
        };
        engine.start_name_node();
        engine.start_data_node();
        engine.wait_for_hdfs();
        Some(engine)
    }

    fn hadoop(&self) -> &Hadoop {
        self.hadoop.as_ref().expect("an engine of HDFS has its configuration")
    }

    /// Starts the NameNode, which is the first process.
    pub(crate) fn start_name_node(&mut self) {
        let command = self.hadoop().command(NAME_NODE, &[]);
        self.processes.insert(0, start_command(command, self.directory.path(), "namenode"));
    }

    /// Kills the NameNode.
    pub(crate) fn kill_name_node(&mut self) {
        stop(self.processes.remove(0));
    }

    fn start_data_node(&mut self) {
        let class = "org.apache.hadoop.hdfs.server.datanode.DataNode";
        let command = self.hadoop().command(class, &[]);
        self.processes.push(start_command(command, self.directory.path(), "datanode"));
    }

    /// Sends a signal to the DataNode, which is the last process.
    pub(crate) fn signal_data_node(&self, signal: Signal) {
        let data_node = self.processes.last().expect("HDFS has a DataNode");
        kill_process(Pid::from_child(data_node), signal).unwrap();
    }

    /// Waits until a file can be written.
    fn wait_for_hdfs(&self) {
        let probe = RemoteStorage::open(&format!("{}/probe", self.url), self.options()).unwrap();
        let mut attempt = 0;
        wait_until("hdfs", || {
            attempt += 1;
            let folder = format!("probe-{attempt}.tmp");
            probe.create_folder(&folder).unwrap();
            let written = probe.create(&folder, "data").and_then(|mut file| {
                file.write(b"x")?;
                file.sync()
            });
            probe.remove_folder(&folder).unwrap();
            written.is_ok()
        });
    }

    /// Runs the file-system shell of Hadoop, as an independent reader. Returns what it prints.
    pub(crate) fn hdfs_shell(&self, arguments: &[&str]) -> Vec<u8> {
        let mut shell = self.hadoop().command("org.apache.hadoop.fs.FsShell", arguments);
        let output = shell.stderr(Stdio::inherit()).output().unwrap();
        assert!(output.status.success(), "FsShell {arguments:?}");
        output.stdout
    }

    /// Sends a command to the administration of HDFS, such as `-safemode enter`.
    pub(crate) fn hdfs_admin(&self, arguments: &[&str]) {
        let class = "org.apache.hadoop.hdfs.tools.DFSAdmin";
        let status = self.hadoop().command(class, arguments).status().unwrap();
        assert!(status.success(), "DFSAdmin {arguments:?}");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.processes.drain(..).rev().for_each(stop);
    }
}

/// The configuration of HDFS on free ports.
struct Hadoop {
    jars: PathBuf,
    configuration: PathBuf,
    name_node_port: u16,
}

const NAME_NODE: &str = "org.apache.hadoop.hdfs.server.namenode.NameNode";

impl Hadoop {
    fn configure(jars: &Path, directory: &Path) -> Hadoop {
        let configuration = directory.join("conf");
        // The jar of HDFS lacks the pages of its web servers, which look for them when they start.
        for pages in ["hdfs", "datanode", "secondary"] {
            let folder = configuration.join("webapps").join(pages).join("WEB-INF");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("web.xml"), "<web-app/>").unwrap();
        }
        let data = directory.join("data");
        let name_node_port = free_port();
        let address = || format!("127.0.0.1:{}", free_port());
        let file = |name: &str, properties: &[(&str, String)]| {
            let lines: String = properties
                .iter()
                .map(|(name, value)| {
                    format!("<property><name>{name}</name><value>{value}</value></property>\n")
                })
                .collect();
            let text = format!("<configuration>\n{lines}</configuration>\n");
            fs::write(configuration.join(name), text).unwrap();
        };
        file(
            "core-site.xml",
            &[
                ("fs.defaultFS", format!("hdfs://127.0.0.1:{name_node_port}")),
                ("hadoop.tmp.dir", data.display().to_string()),
            ],
        );
        let no = "false".to_owned();
        file(
            "hdfs-site.xml",
            &[
                ("dfs.namenode.http-address", address()),
                ("dfs.datanode.address", address()),
                ("dfs.datanode.ipc.address", address()),
                ("dfs.datanode.http.address", address()),
                ("dfs.replication", "1".to_owned()),
                ("dfs.namenode.safemode.extension", "0".to_owned()),
                ("dfs.webhdfs.enabled", no.clone()),
                ("dfs.permissions.enabled", no.clone()),
                ("dfs.namenode.datanode.registration.ip-hostname-check", no),
                ("dfs.blocksize", "1048576".to_owned()),
            ],
        );
        let logging = "log4j.rootLogger=INFO,console\n\
                       log4j.appender.console=org.apache.log4j.ConsoleAppender\n\
                       log4j.appender.console.target=System.err\n\
                       log4j.appender.console.layout=org.apache.log4j.SimpleLayout\n";
        fs::write(configuration.join("log4j.properties"), logging).unwrap();
        Hadoop { jars: jars.to_owned(), configuration, name_node_port }
    }

    fn command(&self, class: &str, arguments: &[&str]) -> Command {
        let mut java = Command::new("java");
        java.args(["-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]);
        java.arg("-Djava.net.preferIPv4Stack=true");
        for package in ["lang", "lang.reflect", "util", "net", "nio"] {
            java.args(["--add-opens", &format!("java.base/java.{package}=ALL-UNNAMED")]);
        }
        java.args(["--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"]);
        for access in ["--add-exports", "--add-opens"] {
            java.args([access, "java.security.jgss/sun.security.krb5=ALL-UNNAMED"]);
        }
        let classes = format!("{}:{}/*", self.configuration.display(), self.jars.display());
        java.args(["-cp", &classes, class]).args(arguments);
        java
    }
}

/// Returns the path that an environment variable names, or prints that its engine is absent.
fn installed(variable: &str, what: &str) -> Option<PathBuf> {
    match std::env::var_os(variable) {
        Some(path) => Some(path.into()),
        None => {
            println!("skipped: {variable} names no {what}");
            None
        }
    }
}

fn start(command: &mut Command, directory: &Path, name: &str) -> Child {
    let log = File::create(directory.join(format!("{name}.log"))).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    command.spawn().unwrap_or_else(|error| panic!("cannot start {name}: {error}"))
}

fn start_command(mut command: Command, directory: &Path, name: &str) -> Child {
    start(&mut command, directory, name)
}

fn log(directory: &Path, name: &str) -> String {
    fs::read_to_string(directory.join(format!("{name}.log"))).unwrap_or_default()
}

fn wait_for(mut child: Child) -> bool {
    child.wait().unwrap().success()
}

fn stop(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn wait_until(what: &str, mut is_ready: impl FnMut() -> bool) {
    let deadline = Instant::now() + START_TIMEOUT;
    while !is_ready() {
        assert!(Instant::now() < deadline, "{what} does not start");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Returns a port that was free a moment ago: the engines take no listening socket.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Sends a request. Returns the status, or `None` while nobody answers.
fn send(port: u16, method: &str, target: &str, headers: &str, body: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {}\r\n\
         Connection: close\r\n{headers}\r\n",
        body.len()
    );
    stream.write_all(request.as_bytes()).ok()?;
    stream.write_all(body).ok()?;
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer.split_whitespace().nth(1)?.parse().ok()
}

/// Moto reads the region of a request there.
const MOTO_AUTHORIZATION: &str =
    "Authorization: AWS4-HMAC-SHA256 Credential=test/20200101/us-east-1/s3/aws4_request\r\n";

/// The account that every Azurite has, with its public key.
const ACCOUNT: &str = "devstoreaccount1";
const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// Creates the container `ckpt`, by a request with a shared key.
fn create_container(port: u16) -> Option<u16> {
    let format = "+%a, %d %b %Y %H:%M:%S GMT";
    let date = Command::new("date").env("LC_ALL", "C").args(["-u", format]).output().unwrap();
    let date = String::from_utf8(date.stdout).unwrap();
    let headers = format!("x-ms-date:{}\nx-ms-version:2021-08-06\n", date.trim());
    let resource = format!("/{ACCOUNT}/{ACCOUNT}/ckpt\nrestype:container");
    let text = format!("PUT{}{headers}{resource}", "\n".repeat(12));
    let signature = base64(&hmac(&from_base64(ACCOUNT_KEY), text.as_bytes()));
    let headers = headers.replace('\n', "\r\n");
    let headers = format!("{headers}Authorization: SharedKey {ACCOUNT}:{signature}\r\n");
    send(port, "PUT", &format!("/{ACCOUNT}/ckpt?restype=container"), &headers, b"")
}

/// HMAC with SHA-256 (RFC 2104), of a key of at most 64 bytes.
fn hmac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let mut block = [0; 64];
    block[..key.len()].copy_from_slice(key);
    let pad = |byte: u8| block.map(|key| key ^ byte);
    let inner = Sha256::new().chain_update(pad(0x36)).chain_update(text).finalize();
    Sha256::new().chain_update(pad(0x5c)).chain_update(inner).finalize().into()
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn base64(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let word = (0..3).fold(0, |word, at| word << 8 | u32::from(*chunk.get(at).unwrap_or(&0)));
        for at in 0..4 {
            let digit = BASE64[(word >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= chunk.len() { digit as char } else { '=' });
        }
    }
    text
}

fn from_base64(text: &str) -> Vec<u8> {
    let digits = text.bytes().filter_map(|byte| BASE64.iter().position(|digit| *digit == byte));
    let digits: Vec<u32> = digits.map(|digit| digit as u32).collect();
    let mut bytes = Vec::new();
    for chunk in digits.chunks(4) {
        let word = (0..4).fold(0, |word, at| word << 6 | chunk.get(at).unwrap_or(&0));
        bytes.extend_from_slice(&word.to_be_bytes()[1..chunk.len()]);
    }
    bytes
}
