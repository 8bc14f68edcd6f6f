//! A store that refuses, hangs or breaks off: each failure names the URL, the operation and the cause.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![cfg(feature = "s3")]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pushpull_checkpoint::{CheckpointStorage, StorageFault};
use pushpull_remote::{RemoteError, RemoteOptions, RemoteStorage};

/// A request: its method and its target.
type Request = (String, String);

/// The reaction of the store to a request: an answer of this status and body, or none at all.
type Answer = Option<(u16, String)>;

/// A server that speaks enough HTTP for the client of S3, and notes all requests.
struct FakeStore {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl FakeStore {
    fn start(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> FakeStore {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let noted = requests.clone();
        let answer = Arc::new(answer);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let noted = noted.clone();
                let answer = answer.clone();
                std::thread::spawn(move || serve(stream.unwrap(), &noted, &*answer));
            }
        });
        FakeStore { address, requests }
    }

    fn options(&self) -> RemoteOptions {
        RemoteOptions::new()
            .value("AWS_ACCESS_KEY_ID", "key-of-the-test")
            .value("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
            .value("AWS_REGION", "us-east-1")
            .value("AWS_ENDPOINT_URL", format!("http://{}", self.address))
            .value("AWS_ALLOW_HTTP", "true")
            .part_bytes(5 << 20)
    }

    fn open(&self, options: RemoteOptions) -> Result<RemoteStorage, StorageFault> {
        match RemoteStorage::open("s3://bucket/run", options) {
            Ok(storage) => Ok(storage),
            Err(RemoteError::Storage(fault)) => Err(fault),
            Err(error) => panic!("{error}"),
        }
    }
}

fn serve(
    stream: TcpStream,
    noted: &Mutex<Vec<Request>>,
    answer: &(dyn Fn(&Request) -> Answer + Send + Sync),
) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut writer = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        let request = (words.next().unwrap(), words.next().unwrap());
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            if header.trim().is_empty() {
                break;
            }
            if let Some(value) = header.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        std::io::copy(&mut (&mut reader).take(length), &mut std::io::sink()).unwrap();
        let answered = answer(&request);
        noted.lock().unwrap().push(request);
        let Some((status, body)) = answered else {
            // It keeps the connection and never answers.
            std::thread::park();
            return;
        };
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\netag: \"1\"\r\n\
             last-modified: Sun, 01 Nov 2026 00:00:00 GMT\r\n\r\n"
        );
        if writer.write_all((head + &body).as_bytes()).is_err() {
            return;
        }
    }
}

fn refusal(status: u16, code: &str) -> Answer {
    Some((status, format!("<Error><Code>{code}</Code><Message>no</Message></Error>")))
}

const EMPTY_LIST: &str = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";

/// Checks the texts of a fault: the operation, the URL and the cause are in it, and no secret.
fn check(fault: &StorageFault, operation: &str, path: &str, cause: &str) {
    assert_eq!((fault.operation, &*fault.path), (operation, path));
    let text = fault.source.to_string();
    assert!(text.contains(cause), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
}

#[test]
fn a_bucket_that_does_not_exist_or_denies_is_refused() {
    for (status, code, kind, cause) in [
        (404, "NoSuchBucket", ErrorKind::NotFound, "NoSuchBucket"),
        (403, "AccessDenied", ErrorKind::PermissionDenied, "AccessDenied"),
        (401, "InvalidToken", ErrorKind::PermissionDenied, "InvalidToken"),
        (
            403,
            "RequestTimeTooSkewed",
            ErrorKind::PermissionDenied,
            "the clock of this machine differs from that of the store",
        ),
    ] {
        let store = FakeStore::start(move |_| refusal(status, code));
        let fault = store.open(store.options()).unwrap_err();
        check(&fault, "open", "s3://bucket/run", cause);
        assert_eq!(fault.source.kind(), kind, "{code}: {}", fault.source);
    }
}

#[test]
fn a_store_that_does_not_answer_is_not_waited_for() {
    let store = FakeStore::start(|_| None);
    let options = store.options().request_timeout(Duration::from_millis(200));
    let fault = store.open(options.operation_timeout(Duration::from_secs(1))).unwrap_err();
    assert_eq!(fault.source.kind(), ErrorKind::TimedOut, "{}", fault.source);
    check(&fault, "open", "s3://bucket/run", "");
}

#[test]
fn a_store_that_is_not_there_is_named() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let store = FakeStore { address: address.to_string(), requests: Arc::default() };
    let options = store.options().operation_timeout(Duration::from_secs(2));
    let fault = store.open(options).unwrap_err();
    check(&fault, "open", "s3://bucket/run", &address.to_string());
}

/// Plain HTTP sends the model in the clear, so it must be asked for.
#[test]
fn http_needs_its_setting() {
    let store = FakeStore::start(|_| Some((200, EMPTY_LIST.to_owned())));
    let fault = store.open(store.options().value("AWS_ALLOW_HTTP", "")).unwrap_err();
    check(&fault, "open", "s3://bucket/run", "URL scheme is not allowed");
}

#[test]
fn an_upload_that_fails_midway_is_aborted() {
    let store = FakeStore::start(|(method, target)| match method.as_str() {
        "GET" if target.contains("list-type") => Some((200, EMPTY_LIST.to_owned())),
        "HEAD" if target.ends_with(".folder") => Some((200, String::new())),
        "HEAD" => Some((404, String::new())),
        "POST" if target.contains("uploads") => {
            let text = "<InitiateMultipartUploadResult><UploadId>up-1</UploadId>\
                        </InitiateMultipartUploadResult>";
            Some((200, text.to_owned()))
        }
        "PUT" if target.contains("partNumber=2") => refusal(403, "QuotaExceeded"),
        "DELETE" => Some((204, String::new())),
        _ => Some((200, String::new())),
    });
    let storage = store.open(store.options()).unwrap();
    let mut file = storage.create("ckpt-0-5.tmp", "data").unwrap();
    let written = file.write(&vec![7; 11 << 20]).and_then(|()| file.sync());
    let fault = written.unwrap_err();
    check(&fault, "complete", "s3://bucket/run/ckpt-0-5.tmp/data", "QuotaExceeded");
    let again = file.write(b"x").unwrap_err();
    check(&again, "write", "s3://bucket/run/ckpt-0-5.tmp/data", "it has failed before");
    drop(file);
    let requests = store.requests.lock().unwrap();
    let aborts =
        |(method, target): &Request| method == "DELETE" && target.contains("uploadId=up-1");
    assert!(requests.iter().any(aborts), "{requests:?}");
    let completes =
        |(method, target): &Request| method == "POST" && target.contains("uploadId=up-1");
    assert!(!requests.iter().any(completes), "{requests:?}");
}

#[test]
fn a_wrong_setting_is_named_without_its_value() {
    let options = RemoteOptions::new().value("AWS_REGION", "us-east-1");
    let open = |options| RemoteStorage::open("s3://bucket/run", options).unwrap_err().to_string();
    let text = open(options.clone().value("AWS_ACCESS_KEY_ID", "only-the-key"));
    assert!(text.starts_with("cannot use \"s3://bucket/run\": "), "{text}");
    assert!(!text.contains("only-the-key"), "{text}");
    let text = open(options.value("AWS_SKIP_SIGNATURE", "perhaps-not"));
    assert!(text.contains("<AWS_SKIP_SIGNATURE>") && !text.contains("perhaps"), "{text}");
}
