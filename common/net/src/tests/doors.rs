//! Who gets through the door of a server, over real sockets: tokens, certificates, and what those
//! who do not are told.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pushpull_common::access::{AccessEvent, DeniedPeer};
use pushpull_common::error::Chain;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{
    AuthOffer, BodyCrc, Challenge, ChallengeAnswer, Heartbeat, HeartbeatAnswer, Hello, Role,
};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, encode, version};
use tokio::task::LocalSet;

use crate::auth::{CredentialFiles, Credentials, ProvenPeer, say_hello};
use crate::{
    AcceptLimits, ArrivedPeer, Connector, Endpoints, FrameStream, NoHello, PeerReceiver, Stream,
    accept,
};

const TRAINERS: &str = "00112233445566778899aabbccddeeff";
const OTHERS: &str = "ffeeddccbbaa99887766554433221100";

/// What a door has seen.
#[derive(Clone, Default)]
struct Seen {
    proven: Rc<RefCell<Vec<Option<ProvenPeer>>>>,
    denied: Rc<RefCell<Vec<DeniedPeer>>>,
    others: Rc<RefCell<Vec<AccessEvent>>>,
    without: Rc<RefCell<Vec<NoHello>>>,
}

impl PeerReceiver for Seen {
    async fn take(&self, peer: ArrivedPeer) {
        self.proven.borrow_mut().push(peer.proven);
        let stream = Stream::attach(peer.stream).unwrap();
        let mut frames = FrameStream::new(stream, peer.reader);
        frames.open();
        // The answer to the hello, and to each heartbeat.
        loop {
            if frames.send(&frame(answer())).await.is_err() || frames.next().await.is_err() {
                return;
            }
        }
    }

    fn no_hello(&self, reason: NoHello) {
        self.without.borrow_mut().push(reason);
    }

    fn access(&self, event: AccessEvent) {
        match event {
            AccessEvent::Denied(peer) => self.denied.borrow_mut().push(peer),
            event => self.others.borrow_mut().push(event),
        }
    }
}

fn answer() -> Message {
    HeartbeatAnswer {}.into()
}

/// Runs a test beside the door of a server with these credentials.
fn with_door<T>(
    credentials: Option<Credentials>,
    test: impl AsyncFnOnce(&Seen, SocketAddr) -> T,
) -> T {
    with_door_for(Duration::from_secs(20), credentials, test)
}

/// Runs a test beside a door that waits this long for a hello.
fn with_door_for<T>(
    handshake_timeout: Duration,
    credentials: Option<Credentials>,
    test: impl AsyncFnOnce(&Seen, SocketAddr) -> T,
) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seen = Seen::default();
    LocalSet::new().block_on(&runtime, async {
        let endpoints = Endpoints::bind("127.0.0.1:0", false).unwrap();
        let address = endpoints.address().parse().unwrap();
        let limits = AcceptLimits { handshake_timeout, waiting_connections_max: 16 };
        accept(endpoints, limits, credentials, seen.clone());
        test(&seen, address).await
    })
}

fn hello(role: Role, task: &TaskId) -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role,
        job: Text::clipped(&*task.job),
        task: task.index,
        shard: ShardId { task: 0, shard: 0 },
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_step: GlobalStep(0),
        seen_arena: 0,
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: List::default(),
        auth: None,
        features: Default::default(),
    }
}

/// Connects, says hello, and has a heartbeat answered.
async fn visit(
    address: SocketAddr,
    credentials: Option<&Credentials>,
    role: Role,
    task: &TaskId,
) -> Result<(), String> {
    let connector =
        Connector::new(&address.to_string()).credentials(credentials.cloned()).task(TaskId::ps(0));
    let connected = connector.connect(Connector::LIMIT).await;
    let connected = connected.map_err(|error| Chain(&error).to_string())?;
    let mut frames = FrameStream::new(connected.stream, FrameReader::new());
    let greeted = say_hello(&mut frames, credentials, Envelope::default(), hello(role, task)).await;
    greeted.map_err(|error| Chain(&error).to_string())?;
    let heartbeat = frame(Heartbeat {}.into());
    for _ in 0..2 {
        match frames.next().await.map_err(|error| Chain(&error).to_string())? {
            (_, Message::Refused(refused)) => return Err(refused.refusal.to_string()),
            (_, message) => assert_eq!(message, answer()),
        }
        frames.send(&heartbeat).await.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Encodes a message without a body.
fn frame(message: Message) -> Vec<u8> {
    let mut frame = Vec::new();
    encode(&mut frame, &Envelope::default(), &message, BodyStamp::NONE);
    frame
}

/// Connects, and offers a token of this name in the hello of a worker. Returns the challenge.
async fn challenged(address: SocketAddr, token: &str) -> (FrameStream, Challenge) {
    let stream = Stream::tcp(tokio::net::TcpStream::connect(address).await.unwrap()).unwrap();
    let mut frames = FrameStream::new(stream, FrameReader::new());
    let offer = AuthOffer { token: Text::clipped(token), nonce: [1; 32] };
    let hello = Hello { auth: Some(offer.into()), ..hello(WORKER, &TaskId::worker(0)) };
    frames.send(&frame(hello.into())).await.unwrap();
    match frames.next().await.unwrap().1 {
        Message::Challenge(challenge) => (frames, challenge),
        other => panic!("{other:?}"),
    }
}

/// Looks at the files, and returns whether they still let a peer in.
fn still_admits(credentials: &Credentials, proven: &ProvenPeer) -> bool {
    credentials.fresh();
    proven.is_admitted()
}

/// A folder with a file of tokens.
struct Tokens(tempfile::TempDir);

impl Tokens {
    fn new(lines: &str) -> Tokens {
        let tokens = Tokens(tempfile::tempdir().unwrap());
        tokens.write(lines);
        tokens
    }

    fn write(&self, lines: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.0.path().join("tokens");
        let new = self.0.path().join("new");
        std::fs::write(&new, lines).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(new, path).unwrap();
    }

    fn files(&self) -> CredentialFiles {
        CredentialFiles::new().tokens(self.0.path().join("tokens"))
    }

    fn open(&self) -> Credentials {
        self.files().open().unwrap()
    }
}

fn trainers() -> String {
    format!("token trainers {TRAINERS} roles=worker tasks=/job:worker/task:*\n")
}

const WORKER: Role = Role::Worker {};

#[test]
fn a_token_lets_its_tasks_in() {
    let servers = Tokens::new(&format!("token readers {OTHERS} roles=reader\n{}", trainers()));
    let clients = Tokens::new(&trainers());
    with_door(Some(servers.open()), async |seen, address| {
        let clients = clients.open();
        visit(address, Some(&clients), WORKER, &TaskId::worker(3)).await.unwrap();
        let proven = seen.proven.borrow();
        assert_eq!(proven[0].as_ref().unwrap().principal.name, "trainers");
        assert!(seen.denied.borrow().is_empty());
    });
}

#[test]
fn an_entry_bounds_the_connections_of_its_owner() {
    let lines = |rest: &str| format!("token trainers {TRAINERS} roles=worker{rest}\n");
    let servers = Tokens::new(&lines(" connections=2"));
    let clients = Tokens::new(&lines(""));
    with_door(Some(servers.open()), async |seen, address| {
        let clients = clients.open();
        let visit = async || visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
        // The door keeps the places of those who have left.
        visit().await.unwrap();
        visit().await.unwrap();
        let text = "too many connections of this access token or certificate: the limit is 2";
        for _ in 0..2 {
            assert_eq!(visit().await, Err(text.to_owned()));
        }
        assert!(seen.denied.borrow().is_empty(), "it has proved who it is");
        let full = AccessEvent::Full { principal: "trainers".to_owned(), limit: 2 };
        assert_eq!(*seen.others.borrow(), [full], "the operator hears it once");
        seen.proven.borrow_mut().pop();
        visit().await.unwrap();
    });
}

/// Who is turned away, what the operator learns, and what the client does.
#[test]
fn those_who_prove_nothing_get_one_answer() {
    let servers = Tokens::new(&format!("token readers {OTHERS} roles=reader\n{}", trainers()));
    let anybody = format!("token trainers {TRAINERS} roles=worker,chief,reader\n");
    let unknown = format!("token nobody {TRAINERS} roles=worker\n");
    let guessed = format!("token trainers {OTHERS} roles=worker\n");
    let unproven =
        |name: &str| format!("the server does not prove that it knows the access token {name}");
    let denied = || "denied".to_owned();
    let other = "trainers may not be this task in this role";
    let without = "it has neither a token nor a certificate";
    // Clients that do not check the proof of the server are in `strangers`.
    let table = [
        (None, WORKER, TaskId::worker(0), denied(), Some(without)),
        (Some(&anybody), Role::Chief {}, TaskId::worker(0), denied(), Some(other)),
        (Some(&anybody), WORKER, TaskId::ps(0), denied(), Some(other)),
        (Some(&anybody), Role::Reader {}, TaskId::worker(0), denied(), Some(other)),
        (Some(&unknown), WORKER, TaskId::worker(0), unproven("nobody"), None),
        (Some(&guessed), WORKER, TaskId::worker(0), unproven("trainers"), None),
    ];
    for (clients, role, task, told, cause) in table {
        with_door(Some(servers.open()), async |seen, address| {
            let clients = clients.map(|lines| Tokens::new(lines).open());
            let visited = visit(address, clients.as_ref(), role, &task).await;
            assert_eq!(visited, Err(told), "{role:?} as {task}");
            assert!(seen.proven.borrow().is_empty());
            let denied = seen.denied.borrow();
            assert_eq!(denied.iter().map(|denied| &*denied.cause).next(), cause);
            if let Some(denied) = denied.first() {
                assert_eq!((&*denied.host, denied.attempts), ("127.0.0.1", 1));
                assert_eq!(denied.claim, Some((role, task)));
                assert_eq!(*seen.without.borrow(), [NoHello::Denied]);
            }
        });
    }
}

#[test]
fn a_client_with_a_token_trusts_no_server_that_does_not_ask_for_it() {
    let clients = Tokens::new(&trainers()).open();
    with_door(None, async |_, address| {
        let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
        let told = "the server has answered HeartbeatAnswer to the offer of the access token \
                    trainers, not a challenge";
        assert_eq!(visited, Err(told.to_owned()));
    });
}

#[test]
fn a_client_that_proves_falsely_is_denied() {
    let servers = Tokens::new(&trainers());
    with_door(Some(servers.open()), async |seen, address| {
        for name in ["trainers", "unknown"] {
            let (mut frames, challenge) = challenged(address, name).await;
            // It sends back what it has heard.
            let answer = ChallengeAnswer { proof: challenge.proof };
            frames.send(&frame(answer.into())).await.unwrap();
            match frames.next().await.unwrap().1 {
                Message::Refused(refused) => assert_eq!(refused.refusal.to_string(), "denied"),
                other => panic!("{other:?}"),
            }
            assert!(frames.next().await.is_err(), "the connection has ended");
        }
        let denied = seen.denied.borrow();
        let told = "it does not know the secret of a token of the name trainers";
        assert_eq!(denied.iter().map(|of| &*of.cause).collect::<Vec<_>>(), [told]);
        assert_eq!(*seen.without.borrow(), [NoHello::Denied, NoHello::Denied]);
    });
}

/// The time for a hello at the doors that are to give up.
const SHORT: Duration = Duration::from_millis(300);

#[test]
fn a_client_that_is_silent_after_the_challenge_runs_out_of_time() {
    let servers = Tokens::new(&trainers());
    for name in ["trainers", "unknown"] {
        with_door_for(SHORT, Some(servers.open()), async |seen, address| {
            let (mut frames, _) = challenged(address, name).await;
            assert!(frames.next().await.is_err(), "the connection has ended");
            assert_eq!(*seen.without.borrow(), [NoHello::TimedOut], "{name}");
            assert!(seen.denied.borrow().is_empty(), "{name}: silence is no failed proof");
        });
    }
}

#[test]
fn a_client_whose_answer_to_the_challenge_drips_runs_out_of_time() {
    let servers = Tokens::new(&trainers());
    with_door_for(SHORT, Some(servers.open()), async |seen, address| {
        let (mut frames, _) = challenged(address, "trainers").await;
        let answer = frame(ChallengeAnswer { proof: [0; 32] }.into());
        // The whole answer would take several times as long as the door waits.
        let pause = 5 * SHORT / answer.len() as u32;
        let mut dripped = 0;
        for byte in &answer {
            if !seen.without.borrow().is_empty() {
                break;
            }
            frames.send(&[*byte]).await.unwrap();
            dripped += 1;
            tokio::time::sleep(pause).await;
        }
        assert!((2..answer.len()).contains(&dripped), "{dripped} of {}", answer.len());
        assert_eq!(*seen.without.borrow(), [NoHello::TimedOut]);
        assert!(seen.denied.borrow().is_empty());
    });
}

/// Hosts that fail wait longer each time, and keep nobody else waiting: not even a client of the
/// same host that proves who it is.
#[test]
fn a_host_that_failed_waits_for_its_refusal_and_its_other_clients_do_not() {
    let servers = Tokens::new(&trainers());
    let clients = Tokens::new(&trainers()).open();
    with_door(Some(servers.open()), async |seen, address| {
        let begun = Instant::now();
        let refused: Rc<RefCell<Vec<Duration>>> = Rc::default();
        let one_is_refused = Rc::new(tokio::sync::Notify::new());
        // The last delay leaves a slow machine time to let the other client in.
        let attempts: Vec<_> = (0..5)
            .map(|_| {
                let refused = refused.clone();
                let one_is_refused = one_is_refused.clone();
                tokio::task::spawn_local(async move {
                    let visited = visit(address, None, WORKER, &TaskId::worker(0)).await;
                    assert_eq!(visited, Err("denied".to_owned()));
                    refused.borrow_mut().push(begun.elapsed());
                    one_is_refused.notify_one();
                })
            })
            .collect();
        one_is_refused.notified().await;
        visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await.unwrap();
        let before = refused.borrow().len();
        assert!((1..5).contains(&before), "{before} refusals came before the other was let in");
        assert_eq!(seen.proven.borrow().len(), 1);
        for attempt in attempts {
            attempt.await.unwrap();
        }
        let refused = refused.borrow();
        let least = [100, 200, 400, 800, 1600].map(Duration::from_millis);
        assert_eq!(refused.len(), least.len());
        for (number, (after, least)) in refused.iter().zip(least).enumerate() {
            assert!(*after >= least, "the refusal {number} came after {after:?}, not {least:?}");
        }
        assert_eq!(*seen.without.borrow(), [NoHello::Denied; 5]);
    });
}

#[test]
fn a_list_that_changes_holds_at_the_next_look() {
    let servers = Tokens::new(&trainers());
    let credentials = servers.open();
    let clients = Tokens::new(&trainers()).open();
    with_door(Some(credentials.clone()), async |seen, address| {
        visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await.unwrap();
        let proven = seen.proven.borrow_mut()[0].take().unwrap();
        assert!(still_admits(&credentials, &proven));
        let look_again = || tokio::time::sleep(Duration::from_millis(300));

        // A second token beside the first changes nothing for its owner.
        let second = format!("token trainers-2 {OTHERS} roles=worker\n");
        servers.write(&format!("{}{second}", trainers()));
        look_again().await;
        assert!(still_admits(&credentials, &proven));

        // What cannot be read changes nothing, and is told.
        servers.write("token trainers");
        look_again().await;
        let problem = Chain(&*credentials.problem().unwrap()).to_string();
        assert!(
            problem.ends_with(
                "line 1 is no entry: it has no secret: the secret has 0 bits, not 128 to 512"
            ),
            "{problem}"
        );
        assert!(still_admits(&credentials, &proven));

        for revoked in [second.clone(), trainers().replace(TRAINERS, OTHERS)] {
            servers.write(&revoked);
            look_again().await;
            assert!(credentials.problem().is_none());
            assert!(!still_admits(&credentials, &proven), "{revoked}");
            let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
            assert!(visited.unwrap_err().starts_with("the server does not prove"));
        }
    });
}

#[test]
fn files_that_others_can_read_or_that_say_nothing_are_refused() {
    use std::os::unix::fs::PermissionsExt;
    let tokens = Tokens::new(&trainers());
    let path = tokens.0.path().join("tokens");
    let told = |files: CredentialFiles| Chain(&files.open().unwrap_err()).to_string();
    for mode in [0o644, 0o640, 0o604, 0o660] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        // A file of root that a group of the process can read is one that Kubernetes mounts.
        if rustix::process::geteuid().is_root() && mode & 0o007 == 0 {
            continue;
        }
        let end =
            format!("its mode {mode:o} lets others read it, so its secrets are none; chmod 600 it");
        assert_eq!(told(tokens.files()), format!("cannot use {}: {end}", path.display()));
    }
    tokens.write("");
    assert_eq!(
        told(tokens.files()),
        format!(
            "cannot use {}: it has no token and no certificate, so nobody could connect",
            path.display()
        )
    );
    let absent = CredentialFiles::new().tokens(tokens.0.path().join("absent"));
    assert!(told(absent).contains("absent: No such file"));
    let folder = CredentialFiles::new().tokens(tokens.0.path());
    assert!(told(folder).ends_with("it is no plain file"));
}

#[cfg(feature = "tls")]
mod tls {
    use std::io;

    use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    use tokio::net::TcpStream;

    use super::*;
    use crate::tests::authority::{Authority, Says, write_secret};
    use crate::tls::TlsMaterial;

    /// Writes bytes, which fit the buffer of the socket.
    async fn write(stream: &TcpStream, bytes: &[u8]) {
        stream.writable().await.unwrap();
        assert_eq!(stream.try_write(bytes).unwrap(), bytes.len());
    }

    /// Reads until the other side has ended the connection. Returns the number of bytes.
    async fn read_to_end(stream: &TcpStream) -> usize {
        let mut read = 0;
        loop {
            stream.readable().await.unwrap();
            match stream.try_read(&mut [0; 4096]) {
                Ok(0) => return read,
                Ok(count) => read += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The other side has not read all that was sent.
                Err(_) => return read,
            }
        }
    }

    /// Returns the first bytes of a client's handshake.
    fn client_hello(authority: &Authority) -> Vec<u8> {
        let mut material = TlsMaterial::default();
        material.set_authority(&std::fs::read(authority.path("ca.pem")).unwrap()).unwrap();
        let client = material.client().unwrap();
        let mut connection = client.connection("127.0.0.1", None).unwrap();
        let mut bytes = Vec::new();
        connection.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_client_that_is_silent_in_the_handshake_runs_out_of_time() {
        let authority = Authority::new();
        authority.sign("ps", Says::default());
        let hello = client_hello(&authority);
        // Nothing, a part of a record, a part of the message, and all but its last byte.
        for sent in [0, 3, 100, hello.len() - 1, hello.len()] {
            let servers = authority.files("ps").open().unwrap();
            with_door_for(SHORT, Some(servers), async |seen, address| {
                let stream = TcpStream::connect(address).await.unwrap();
                write(&stream, &hello[..sent]).await;
                let answered = read_to_end(&stream).await;
                // The server has done its part of the handshake if it has the whole message.
                assert_eq!(answered > 0, sent == hello.len(), "{sent}: {answered} bytes");
                assert_eq!(*seen.without.borrow(), [NoHello::TimedOut], "{sent}");
                assert!(seen.denied.borrow().is_empty(), "{sent}: silence is no failed proof");
            });
        }
    }

    #[test]
    fn a_client_whose_handshake_drips_runs_out_of_time() {
        let authority = Authority::new();
        authority.sign("ps", Says::default());
        let hello = client_hello(&authority);
        with_door_for(SHORT, Some(authority.files("ps").open().unwrap()), async |seen, address| {
            let stream = TcpStream::connect(address).await.unwrap();
            // The whole message would take several times as long as the door waits.
            let pause = 5 * SHORT / hello.len() as u32;
            for byte in hello.chunks(1) {
                if !seen.without.borrow().is_empty() {
                    break;
                }
                write(&stream, byte).await;
                tokio::time::sleep(pause).await;
            }
            assert_eq!(*seen.without.borrow(), [NoHello::TimedOut]);
        });
    }

    #[test]
    fn a_client_that_is_silent_after_the_handshake_runs_out_of_time() {
        let authority = Authority::new();
        authority.sign("ps", Says::default());
        with_door_for(SHORT, Some(authority.files("ps").open().unwrap()), async |seen, address| {
            let clients = authority.trusting().open().unwrap();
            let connector = Connector::new(&address.to_string()).credentials(Some(clients));
            let connected = connector.connect(Connector::LIMIT).await.unwrap();
            let mut frames = FrameStream::new(connected.stream, FrameReader::new());
            assert!(frames.next().await.is_err(), "the connection has ended");
            assert_eq!(*seen.without.borrow(), [NoHello::TimedOut]);
        });
    }

    #[test]
    fn a_certificate_is_the_task_that_it_names() {
        let authority = Authority::new();
        authority.sign("ps", Says { names: &["/job:ps/task:0"], ..Says::default() });
        authority.sign("w1", Says { names: &["/job:worker/task:1"], ..Says::default() });
        authority.sign("w", Says { names: &["/job:worker/task:*"], ..Says::default() });
        let servers = authority.files("ps").open().unwrap();
        with_door(Some(servers), async |seen, address| {
            let one = authority.files("w1").open().unwrap();
            let any = authority.files("w").open().unwrap();
            let denied = Err("denied".to_owned());
            let chief = Role::Chief {};
            assert_eq!(visit(address, Some(&one), WORKER, &TaskId::worker(1)).await, Ok(()));
            assert_eq!(visit(address, Some(&one), WORKER, &TaskId::worker(0)).await, denied);
            assert_eq!(visit(address, Some(&one), chief, &TaskId::worker(1)).await, denied);
            assert_eq!(visit(address, Some(&any), WORKER, &TaskId::worker(7)).await, Ok(()));
            assert_eq!(visit(address, Some(&any), chief, &TaskId::worker(0)).await, Ok(()));
            assert_eq!(
                visit(address, Some(&any), Role::Reader {}, &TaskId::worker(0)).await,
                denied
            );
            let names: Vec<String> =
                seen.proven.borrow().iter().flatten().map(|of| of.principal.name.clone()).collect();
            assert_eq!(names, ["/job:worker/task:1", "/job:worker/task:*", "/job:worker/task:*"]);
        });
    }

    /// What a client says of servers whose certificates are not what they must be.
    #[test]
    fn servers_with_wrong_certificates_are_not_spoken_to() {
        let authority = Authority::new();
        let stranger = Authority::new();
        let peer = "invalid peer certificate: certificate ";
        let other = "it is the certificate of /job:ps/task:1, not of /job:ps/task:0".to_owned();
        let says = |names| Says { names, ..Says::default() };
        let table = [
            ("host", says(&["127.0.0.1"]), None),
            ("task", says(&["/job:ps/task:0"]), None),
            ("tasks", says(&["/job:ps/task:*"]), None),
            (
                "old",
                Says { years: (2020, 2021), ..Says::default() },
                Some(format!("{peer}expired: ")),
            ),
            (
                "new",
                Says { years: (2090, 2099), ..Says::default() },
                Some(format!("{peer}not valid yet: ")),
            ),
            (
                "elsewhere",
                says(&["10.0.0.1", "example.org"]),
                Some(format!("{peer}not valid for name ")),
            ),
            ("ps1", says(&["/job:ps/task:1", "127.0.0.1"]), Some(other)),
            (
                "client",
                Says { usages: &[ClientAuth], ..Says::default() },
                Some(format!("{peer}does not allow extended key usage ")),
            ),
        ];
        for (name, says, fault) in table {
            authority.sign(name, says);
            let servers = authority.files(name).open().unwrap();
            with_door(Some(servers), async |seen, address| {
                let clients = Tokens::new(&trainers());
                let clients = clients.files().authority(authority.path("ca.pem")).open().unwrap();
                let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
                let Some(fault) = fault else {
                    // The server has a certificate and no tokens.
                    let told = visited.unwrap_err();
                    assert!(told.starts_with("denied"), "{name}: {told}");
                    return;
                };
                let told = visited.unwrap_err();
                let begin = format!("cannot speak TLS with {address}: {fault}");
                assert!(told.starts_with(&begin), "{name}: {told}");
                assert!(seen.proven.borrow().is_empty());
            });
        }
        stranger.sign("self", Says::default());
        with_door(Some(stranger.files("self").open().unwrap()), async |_, address| {
            let clients = authority.trusting().open().unwrap();
            let told = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
            assert!(told.unwrap_err().ends_with("invalid peer certificate: UnknownIssuer"));
        });
    }

    /// What an operator learns of clients whose certificates are not what they must be.
    #[test]
    fn clients_with_wrong_certificates_are_denied() {
        let authority = Authority::new();
        let stranger = Authority::new();
        authority.sign("ps", Says::default());
        stranger.sign("self", Says { names: &["/job:worker/task:0"], ..Says::default() });
        let worker = &["/job:worker/task:0"];
        authority.sign("old", Says { names: worker, years: (2020, 2021), ..Says::default() });
        authority.sign("new", Says { names: worker, years: (2090, 2099), ..Says::default() });
        authority.sign("server", Says { names: worker, usages: &[ServerAuth], ..Says::default() });
        let own = |of: &Authority, name: &str| {
            let path = |end: &str| of.path(&format!("{name}.{end}"));
            authority.trusting().certificate(path("pem"), path("key")).open().unwrap()
        };
        let table = [
            (own(&stranger, "self"), "UnknownIssuer"),
            (own(&authority, "old"), "certificate expired"),
            (own(&authority, "new"), "certificate not valid yet"),
            (own(&authority, "server"), "certificate does not allow extended key usage"),
        ];
        for (clients, cause) in table {
            let servers = authority.files("ps").open().unwrap();
            with_door(Some(servers), async |seen, address| {
                let visited = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
                assert!(visited.is_err(), "{cause}");
                let denied = seen.denied.borrow();
                assert!(denied[0].cause.contains(cause), "{}", denied[0].cause);
                assert_eq!(denied[0].claim, None);
                assert!(seen.proven.borrow().is_empty());
            });
        }
    }

    #[test]
    fn sides_without_tls_learn_what_they_have_met() {
        let authority = Authority::new();
        authority.sign("ps", Says::default());
        let task = TaskId::worker(0);
        with_door(Some(authority.files("ps").open().unwrap()), async |_, address| {
            let told = visit(address, None, WORKER, &task).await.unwrap_err();
            assert!(told.ends_with("this server speaks TLS only"), "{told}");
        });
        with_door(None, async |_, address| {
            let clients = authority.files("ps").open().unwrap();
            let told = visit(address, Some(&clients), WORKER, &task).await.unwrap_err();
            let begin = format!("cannot speak TLS with {address}");
            assert_eq!(told, format!("{begin}: the other side speaks without TLS"));
        });
    }

    #[test]
    fn a_token_over_tls_is_bound_to_its_channel() {
        let authority = Authority::new();
        authority.sign("ps", Says::default());
        write_secret(&authority.path("tokens"), &trainers());
        let servers = authority.files("ps").tokens(authority.path("tokens")).open().unwrap();
        with_door(Some(servers), async |seen, address| {
            let clients = authority.trusting().tokens(authority.path("tokens")).open().unwrap();
            assert_eq!(visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await, Ok(()));
            assert_eq!(seen.proven.borrow()[0].as_ref().unwrap().principal.name, "trainers");
            let stranger = authority.trusting().open().unwrap();
            let visited = visit(address, Some(&stranger), WORKER, &TaskId::worker(0)).await;
            assert_eq!(visited, Err("denied".to_owned()));
        });
    }

    #[test]
    fn the_next_connection_uses_a_certificate_that_was_replaced() {
        let authority = Authority::new();
        authority.sign("ps", Says { names: &["/job:ps/task:1"], ..Says::default() });
        authority.sign("w", Says { names: &["/job:worker/task:*"], ..Says::default() });
        let servers = authority.files("ps").open().unwrap();
        with_door(Some(servers.clone()), async |_, address| {
            let clients = authority.files("w").open().unwrap();
            let told = visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await;
            assert!(told.unwrap_err().ends_with("not of /job:ps/task:0"));
            authority.sign("ps", Says { names: &["/job:ps/task:0"], ..Says::default() });
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await, Ok(()));
            // A key that is not that of the certificate: what was there before holds.
            std::fs::copy(authority.path("w.key"), authority.path("ps.key")).unwrap();
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(visit(address, Some(&clients), WORKER, &TaskId::worker(0)).await, Ok(()));
            let problem = Chain(&*servers.problem().unwrap()).to_string();
            assert!(problem.ends_with("its key is not that of the certificate"), "{problem}");
        });
    }
}
