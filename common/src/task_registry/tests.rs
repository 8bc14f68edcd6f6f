//! Stories of tasks at a rendezvous as tables that a person can check, and random ones.

use proptest::prelude::*;

use super::*;
use crate::cluster::ClusterError;
use crate::ids::{GlobalStep, Incarnation, RestoreEpoch, ShardId};
use crate::protocol::message::{BodyCrc, FeatureOffer};
use crate::protocol::version;

impl TaskRegistry {
    /// Asserts the invariants of the type.
    fn check_invariants(&self) {
        let mut connections: Vec<u64> = self.connections().map(|(number, _)| number).collect();
        let number = connections.len();
        connections.sort_unstable();
        connections.dedup();
        assert_eq!(connections.len(), number, "two tasks share a connection");
        let mut addresses = Vec::new();
        for job in GatheredJob::ALL {
            let tasks = self.tasks(job);
            assert!(tasks.len() <= self.size_of(job) as usize, "{job:?} has too many tasks");
            let mut indices: Vec<_> = tasks.values().filter_map(|task| task.index).collect();
            indices.sort_unstable();
            match &self.cluster {
                Some(_) => assert_eq!(indices, (0..self.size_of(job)).collect::<Vec<_>>()),
                None => {
                    assert!(indices.is_empty(), "an index before all have registered");
                    assert!(tasks.values().all(|task| task.connection.is_some()));
                }
            }
            for (key, task) in tasks {
                if let (TaskKey::Index { index }, Some(assigned)) = (key, task.index) {
                    assert_eq!(*index, assigned, "the index of a key");
                }
                addresses.extend(canonical(&task.address).ok());
            }
        }
        let number = addresses.len();
        addresses.sort();
        addresses.dedup();
        assert_eq!(addresses.len(), number, "two tasks share an address");
        assert_eq!(self.cluster, self.cluster.as_ref().and_then(|_| self.build()));
        assert_eq!(self.cluster.is_some(), self.is_complete(), "the cluster is that of all tasks");
    }
}

fn hello(size: ClusterSize) -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role: Role::Task {},
        job: Text::default(),
        task: 0,
        shard: ShardId { task: 0, shard: 0 },
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_step: GlobalStep(0),
        seen_arena: 0,
        catalogue: None,
        body_crc: BodyCrc::Off {},
        identity: identity(size).to_wire(),
        auth: Default::default(),
        features: FeatureOffer::default(),
    }
}

/// Reads a key: `#3` is an index, and another text an id.
fn key(text: &str) -> TaskKey {
    match text.strip_prefix('#') {
        Some(index) => TaskKey::Index { index: index.parse().unwrap() },
        None => TaskKey::Id { id: Text::clipped(text) },
    }
}

fn request(job: &str, key: TaskKey, address: &str) -> RegisterTask {
    RegisterTask { job: Text::clipped(job), key, address: Text::clipped(address) }
}

/// Plays lines such as `3 ps #0 a:1` (connection 3 registers), `3 closed` and `report` for 2 ps tasks
/// and 2 workers. Below each are the outputs, indented.
fn play(script: &str) {
    let size = ClusterSize::new(2, 2).unwrap();
    let mut registry = TaskRegistry::new(size);
    let mut played = String::new();
    for line in script.lines().filter(|line| !line.starts_with("    ")) {
        let words: Vec<&str> = line.split(' ').collect();
        registry.handle(match words[..] {
            ["report"] => RegistryInput::Report,
            [connection, "closed"] => {
                RegistryInput::Closed { connection: connection.parse().unwrap() }
            }
            [connection, job, id, address] => RegistryInput::Register {
                connection: connection.parse().unwrap(),
                hello: Box::new(hello(size)),
                task: request(job, key(id), address),
            },
            _ => panic!("{line:?} is no step"),
        });
        registry.check_invariants();
        played += &format!("{line}\n");
        while let Some(output) = registry.poll_output() {
            played += &format!("    {}\n", text(&output));
        }
    }
    assert_eq!(played, script);
}

fn text(output: &RegistryOutput) -> String {
    match output {
        RegistryOutput::Send { connection, message, body } => match &**message {
            Message::ClusterWaits(ClusterWaits { registered, tasks, missing }) => {
                format!("{connection}: {registered} of {tasks}, missing {missing}")
            }
            Message::ClusterIs(ClusterIs { index }) => {
                format!("{connection}: task {index} of {body}")
            }
            Message::Refused(Refused { refusal }) => format!("{connection}: refused, {refusal}"),
            other => panic!("{other:?}"),
        },
        RegistryOutput::Close { connection } => format!("{connection} is closed"),
        RegistryOutput::Event(event) => event.to_string(),
    }
}

#[test]
fn ranks_keep_their_indices_and_learn_new_addresses() {
    play(
        "\
1 worker #1 -
    1: 1 of 4, missing ps 0-1, worker 0
2 ps #1 b:1
    2: 2 of 4, missing ps 0, worker 0
3 worker #0 -
    3: 3 of 4, missing ps 0
report
    2: 3 of 4, missing ps 0
    3: 3 of 4, missing ps 0
    1: 3 of 4, missing ps 0
    3 of 4 tasks have registered; missing: ps 0
3 closed
4 ps #0 a:1
    4: 3 of 4, missing worker 0
5 worker #0 -
    all tasks have registered: ps=a:1,b:1;worker=-,-
    4: task 0 of ps=a:1,b:1;worker=-,-
    2: task 1 of ps=a:1,b:1;worker=-,-
    5: task 0 of ps=a:1,b:1;worker=-,-
    1: task 1 of ps=a:1,b:1;worker=-,-
report
2 closed
6 ps #1 c:1
    /job:ps/task:1 has registered again
    6: task 1 of ps=a:1,c:1;worker=-,-
1 closed
7 worker #1 -
    /job:worker/task:1 has registered again
    7: task 1 of ps=a:1,c:1;worker=-,-
",
    );
}

#[test]
fn a_lost_task_gives_its_address_to_one_that_comes_in_its_place() {
    let gather = "\
1 ps a host1:1
    1: 1 of 4, missing 1 of the job ps, worker 0-1
2 ps b host2:1
    2: 2 of 4, missing worker 0-1
3 worker #0 -
    3: 3 of 4, missing worker 1
4 worker #1 -
    all tasks have registered: ps=host1:1,host2:1;worker=-,-
    1: task 0 of ps=host1:1,host2:1;worker=-,-
    2: task 1 of ps=host1:1,host2:1;worker=-,-
    3: task 0 of ps=host1:1,host2:1;worker=-,-
    4: task 1 of ps=host1:1,host2:1;worker=-,-
";
    // Another id on the same host takes the place of the task that had its address.
    play(&format!(
        "{gather}\
1 closed
2 closed
5 ps c host2:1
    /job:ps/task:1 has registered again
    5: task 1 of ps=host1:1,host2:1;worker=-,-
6 ps d host1:1
    /job:ps/task:0 has registered again
    6: task 0 of ps=host1:1,host2:1;worker=-,-
"
    ));
    // Two tasks that come back on each other's hosts keep their indices.
    play(&format!(
        "{gather}\
1 closed
2 closed
5 ps a host2:1
    /job:ps/task:0 has registered again
    5: task 0 of ps=host2:1,host1:1;worker=-,-
6 ps b host1:1
    /job:ps/task:1 has registered again
    6: task 1 of ps=host2:1,host1:1;worker=-,-
"
    ));
    // A task that lives keeps its address.
    play(&format!(
        "{gather}\
1 closed
5 ps c host2:1
    5: refused, messages of kind 112 are not supported: host2:1 is the address of ps \"b\"
    5 is closed
    refused ps \"c\" at host2:1: messages of kind 112 are not supported: host2:1 is the address of ps \"b\"
"
    ));
}

#[test]
fn ids_are_numbered_in_their_order_and_replace_lost_ones() {
    play(
        "\
1 ps node-b b:1
    1: 1 of 4, missing 1 of the job ps, worker 0-1
2 ps node-a a:1
    2: 2 of 4, missing worker 0-1
3 worker y -
    3: 3 of 4, missing 1 of the job worker
4 worker #0 -
    all tasks have registered: ps=a:1,b:1;worker=-,-
    2: task 0 of ps=a:1,b:1;worker=-,-
    1: task 1 of ps=a:1,b:1;worker=-,-
    4: task 0 of ps=a:1,b:1;worker=-,-
    3: task 1 of ps=a:1,b:1;worker=-,-
5 ps node-c c:1
    5: refused, too many tasks of the job ps: the limit is 2
    5 is closed
    refused ps \"node-c\" at c:1: too many tasks of the job ps: the limit is 2
1 closed
6 ps node-c c:1
    /job:ps/task:1 has registered again
    6: task 1 of ps=a:1,c:1;worker=-,-
7 ps node-b b:1
    7: refused, too many tasks of the job ps: the limit is 2
    7 is closed
    refused ps \"node-b\" at b:1: too many tasks of the job ps: the limit is 2
4 closed
8 worker z -
    8: refused, too many tasks of the job worker: the limit is 2
    8 is closed
    refused worker \"z\" at -: too many tasks of the job worker: the limit is 2
",
    );
}

#[test]
fn a_refused_task_changes_nothing() {
    play(
        "\
1 ps #0 a:1
    1: 1 of 4, missing ps 1, worker 0-1
2 ps #1 A:1
    2: refused, messages of kind 112 are not supported: A:1 is the address of ps 0
    2 is closed
    refused ps 1 at A:1: messages of kind 112 are not supported: A:1 is the address of ps 0
3 ps #1 -
    3: refused, messages of kind 112 are not supported: \"-\": workers find a ps task by its address
    3 is closed
    refused ps 1 at -: messages of kind 112 are not supported: \"-\": workers find a ps task by its address
4 worker #2 -
    4: refused, task 2 of job \"worker\" is not accepted: the job has 2 tasks
    4 is closed
    refused worker 2 at -: task 2 of job \"worker\" is not accepted: the job has 2 tasks
5 evaluator #0 -
    5: refused, messages of kind 112 are not supported: the jobs of the cluster are ps and worker
    5 is closed
    refused evaluator 0 at -: messages of kind 112 are not supported: the jobs of the cluster are ps and worker
6 ps #0 b:1
    1: refused, client epoch 1 is fenced by epoch 2
    1 is closed
    6: 1 of 4, missing ps 1, worker 0-1
1 closed
report
    6: 1 of 4, missing ps 1, worker 0-1
    1 of 4 tasks have registered; missing: ps 1, worker 0-1
",
    );
}

#[test]
fn tasks_agree_on_the_size_and_the_role() {
    let size = ClusterSize::new(1, 1).unwrap();
    let mut registry = TaskRegistry::new(size);
    let other = hello(ClusterSize::new(1, 2).unwrap());
    let rank = Hello { role: Role::Rank {}, ..hello(size) };
    for (connection, (hello, expected)) in
        (0..).zip([(other, "num_workers: the server has \"1\""), (rank, "role 7")])
    {
        let hello = Box::new(hello);
        let task = request("worker", key("#0"), "-");
        registry.handle(RegistryInput::Register { connection, hello, task });
        registry.check_invariants();
        let told = text(&registry.poll_output().unwrap());
        assert!(told.contains(expected), "{told}");
        while registry.poll_output().is_some() {}
    }
    assert!(registry.ps.is_empty() && registry.workers.is_empty());
}

#[test]
fn a_size_has_a_ps_task_and_a_limit() {
    assert!(ClusterSize::new(1, ClusterSize::TASKS_MAX - 1).is_ok());
    for (num_ps, num_workers) in [(0, 1), (1, ClusterSize::TASKS_MAX), (u32::MAX, u32::MAX)] {
        let error = ClusterSize::new(num_ps, num_workers).unwrap_err();
        assert_eq!(error, ClusterError::Size { num_ps, num_workers });
    }
}

#[test]
fn the_longest_cluster_fits_its_message() {
    let mut registry = TaskRegistry::new(ClusterSize::new(ClusterSize::TASKS_MAX, 0).unwrap());
    let hello = hello(registry.size);
    for index in 0..ClusterSize::TASKS_MAX {
        let mut host = format!("{index}x");
        host += &"h".repeat(limits::TASK_ADDRESS_BYTES_MAX - host.len() - 2);
        let task = request("ps", TaskKey::Index { index }, &format!("{host}:1"));
        let hello = Box::new(hello.clone());
        registry.handle(RegistryInput::Register { connection: index.into(), hello, task });
    }
    assert!(registry.is_complete() && !registry.is_done());
    let outputs = std::iter::from_fn(|| registry.poll_output());
    let longest = outputs.filter_map(|output| match output {
        RegistryOutput::Send { body, .. } => Some(body.len() as u64),
        _ => None,
    });
    let longest = longest.max().unwrap();
    assert!(longest > 200_000 && longest <= limits::CLUSTER_BYTES_MAX, "{longest}");
}

proptest! {
    /// Connections register any tasks in any order, and end.
    #[test]
    fn every_walk_keeps_the_invariants(steps in prop::collection::vec((0..5u8, 0..4u32, 0..6u32), 1..60)) {
        let size = ClusterSize::new(2, 1).unwrap();
        let mut registry = TaskRegistry::new(size);
        let mut open = Vec::new();
        for (connection, (step, who, port)) in (0..).zip(steps) {
            let job = ["ps", "worker"][who as usize % 2];
            let id = match who < 2 {
                true => TaskKey::Index { index: port % 3 },
                false => TaskKey::Id { id: Text::clipped(format!("id-{}", port % 3)) },
            };
            registry.handle(match step {
                0 => RegistryInput::Report,
                1 if !open.is_empty() => {
                    RegistryInput::Closed { connection: open.remove(port as usize % open.len()) }
                }
                _ => {
                    open.push(connection);
                    let task = request(job, id, &format!("h:{}", port + 1));
                    RegistryInput::Register { connection, hello: Box::new(hello(size)), task }
                }
            });
            registry.check_invariants();
            while let Some(output) = registry.poll_output() {
                if let RegistryOutput::Close { connection } = output {
                    open.retain(|other| *other != connection);
                }
            }
        }
        for connection in open {
            registry.handle(RegistryInput::Closed { connection });
            registry.check_invariants();
        }
        prop_assert_eq!(registry.is_done(), registry.cluster.is_some());
    }
}
