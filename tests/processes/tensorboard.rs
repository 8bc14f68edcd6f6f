//! Event files and records of this crate, read by TensorBoard itself.
//!
//! The tests need a Python with the package `tensorboard`: the program in `PUSHPULL_TENSORBOARD`,
//! the virtual environment `target/tensorboard` (`.ci/run` makes it), or `python3`. Without one
//! they are skipped.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use pushpull::training::summary::{
    Hyperparameters, ImageChannels, RunStatus, SummaryConfig, SummaryHistogram, SummaryImage,
    SummaryWriter,
};
use pushpull::training::tfrecord::{TfRecordReader, TfRecordWriter};
use serde_json::{Value, json};

use crate::test_process::{LONG, TestProcess};

/// TensorBoard has two readers of event files, one in Python and one in Rust.
const READERS: [&str; 2] = ["--load_fast=false", "--load_fast=true"];

#[test]
fn tensorboard_shows_what_was_written() {
    let Some(python) = python() else { return };
    let logs = tempfile::tempdir().unwrap();
    let written = Written::new(&logs.path().join("run-1"), 0.5, RunStatus::Success);
    Written::new(&logs.path().join("run-2"), 0.25, RunStatus::Failure);
    for reader in READERS {
        let tensorboard = TensorBoard::start(&python, logs.path(), reader);
        check_scalars(&tensorboard, &written);
        check_histograms(&tensorboard, &written);
        check_text(&tensorboard, &written);
        check_images(&tensorboard, &written);
        check_hyperparameters(&tensorboard);
    }
}

#[test]
fn points_appear_while_a_run_goes_on_and_after_a_crash() {
    let Some(python) = python() else { return };
    for reader in READERS {
        let logs = tempfile::tempdir().unwrap();
        let run = logs.path().join("run");
        let mut writer = writer(&run);
        writer.scalar(1, "loss", 1.0).unwrap();
        writer.flush().unwrap();
        let tensorboard = TensorBoard::start(&python, logs.path(), reader);
        assert_eq!(tensorboard.steps("run", "loss", 1), [1]);
        (2..=10).for_each(|step| writer.scalar(step, "loss", 1.0).unwrap());
        writer.flush().unwrap();
        assert_eq!(tensorboard.steps("run", "loss", 10), Vec::from_iter(1..=10));

        // A kill tears the last record. The next process begins a new file.
        writer.scalar(11, "loss", 1.0).unwrap();
        let path = writer.path().to_owned();
        drop(writer);
        let size = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(size - 3).unwrap();
        let mut writer = self::writer(&run);
        (12..=20).for_each(|step| writer.scalar(step, "loss", 1.0).unwrap());
        drop(writer);
        // Whether the reader saw step 11 before it was torn is a race.
        let steps = tensorboard.wait(|tensorboard| {
            let points = tensorboard.points("scalars", "run", "loss")?;
            let steps: Vec<u64> = points.iter().filter_map(|point| point[1].as_u64()).collect();
            (steps.last() == Some(&20)).then_some(steps)
        });
        let steps: Vec<u64> = steps.into_iter().filter(|&step| step != 11).collect();
        assert_eq!(steps, Vec::from_iter((1..=10).chain(12..=20)), "{reader}");
    }
}

#[test]
fn tensorboard_reads_our_records_and_we_read_its() {
    let Some(python) = python() else { return };
    let directory = tempfile::tempdir().unwrap();
    let [ours, theirs] = ["ours", "theirs"].map(|name| directory.path().join(name));
    let lengths = [0, 1, 9, 1000, 100_000, 3];
    let records = lengths.map(|length| Vec::from_iter((0..length).map(|i| (i * 31 % 251) as u8)));
    let mut writer = TfRecordWriter::create(&ours).unwrap();
    records.iter().for_each(|record| writer.append(record).unwrap());
    writer.sync().unwrap();
    // The torn end of another record.
    writer.append(&[7; 50]).unwrap();
    drop(writer);
    let size = fs::metadata(&ours).unwrap().len();
    OpenOptions::new().write(true).open(&ours).unwrap().set_len(size - 3).unwrap();

    let output = Command::new(&python).args(["-c", COPY_RECORDS]).args([&ours, &theirs]).output();
    let output = output.unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.starts_with("6 records, then DataLossError"), "{said}");
    let reader = TfRecordReader::open(&theirs).unwrap();
    assert_eq!(reader.torn_tail(), None);
    assert!(reader.iter().map(Result::unwrap).eq(records));
    assert_eq!(fs::read(&theirs).unwrap(), fs::read(&ours).unwrap()[..size as usize - 66]);
    assert_eq!(TfRecordReader::open(&ours).unwrap().torn_tail().unwrap().records, 6);
}

/// Reads records with TensorBoard's reader, and writes them with its writer.
const COPY_RECORDS: &str = r#"
import sys
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.summary.writer.record_writer import RecordWriter

reader = PyRecordReader_New(sys.argv[1])
writer = RecordWriter(open(sys.argv[2], "wb"))
count, end = 0, "no error"
while True:
    try:
        reader.GetNext()
    except errors.OutOfRangeError:
        break
    except errors.DataLossError as error:
        end = f"DataLossError {error}"
        break
    writer.write(reader.record())
    count += 1
writer.close()
print(f"{count} records, then {end}")
"#;

/// What one run has written, for the comparison.
struct Written {
    scalars: Vec<f32>,
    histogram: SummaryHistogram,
    image: SummaryImage,
}

impl Written {
    /// Writes a run of every kind of summary.
    fn new(run: &Path, rate: f64, status: RunStatus) -> Written {
        let mut writer = writer(run);
        let settings = Hyperparameters::new().set("rate", rate).set("optimizer", "adam");
        writer.begin_run(&settings.set("shuffle", true).metric("loss")).unwrap();
        let scalars: Vec<f32> = (0..50).map(|step| rate as f32 * 3.7 / (step + 1) as f32).collect();
        for (step, &value) in scalars.iter().enumerate() {
            writer.scalar(step as u64, "loss", value).unwrap();
        }
        for (step, value) in [f64::NAN, f64::INFINITY, 0.0].into_iter().enumerate() {
            writer.scalar(step as u64, "broken/values", value).unwrap();
        }
        let values = (0..1000).map(|i| f64::from(i % 37) * 0.1 - 1.5);
        let histogram = SummaryHistogram::of(values);
        writer.histogram(7, "weights", &histogram).unwrap();
        writer.histogram(8, "weights", &SummaryHistogram::of([0.0_f32; 0])).unwrap();
        writer.text(3, "notes", "some *emphasis* & <tags>").unwrap();
        let pixels: Vec<u8> = (0..3 * 20 * 10).map(|i| (i * 7 % 256) as u8).collect();
        let image = SummaryImage::from_pixels(20, 10, ImageChannels::Rgb, &pixels).unwrap();
        writer.image(4, "input", &image).unwrap();
        writer.end_run(status).unwrap();
        writer.sync().unwrap();
        Written { scalars, histogram, image }
    }
}

fn writer(run: &Path) -> SummaryWriter {
    SummaryWriter::create(run, SummaryConfig::new().json_lines(true)).unwrap()
}

fn check_scalars(tensorboard: &TensorBoard, written: &Written) {
    let steps = tensorboard.steps("run-1", "loss", written.scalars.len());
    assert_eq!(steps, Vec::from_iter(0..50));
    let points = tensorboard.points("scalars", "run-1", "loss").unwrap();
    let values: Vec<f32> = points.iter().map(|point| point[2].as_f64().unwrap() as f32).collect();
    assert_eq!(values, written.scalars);
    let times: Vec<f64> = points.iter().map(|point| point[0].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] > 1.7e9, "{times:?}");
    let points = tensorboard.points("scalars", "run-1", "broken/values").unwrap();
    let values: Vec<&Value> = points.iter().map(|point| &point[2]).collect();
    assert_eq!(values, [&json!("NaN"), &json!("Infinity"), &json!(0.0)]);
}

/// TensorBoard drops empty buckets at both ends, and bounds the others by minimum and maximum.
fn check_histograms(tensorboard: &TensorBoard, written: &Written) {
    let points =
        tensorboard.wait(|tensorboard| tensorboard.points("histograms", "run-1", "weights"));
    assert_eq!((points.len(), points[0][1].as_u64(), points[1][1].as_u64()), (2, Some(7), Some(8)));
    let limits = written.histogram.limits();
    let counts = written.histogram.counts();
    let first = counts.iter().position(|&count| count > 0.0).unwrap();
    let last = counts.iter().rposition(|&count| count > 0.0).unwrap();
    let expected: Vec<[f32; 3]> = (first..=last)
        .map(|bucket| {
            let left = if bucket == first { written.histogram.min() } else { limits[bucket - 1] };
            let right = if bucket == last { written.histogram.max() } else { limits[bucket] };
            [left as f32, right as f32, counts[bucket] as f32]
        })
        .collect();
    let buckets: Vec<[f32; 3]> = serde_json::from_value(points[0][2].clone()).unwrap();
    assert_eq!(buckets, expected);
    assert_eq!(buckets.iter().map(|bucket| bucket[2]).sum::<f32>(), 1000.0);
    let empty: Vec<[f32; 3]> = serde_json::from_value(points[1][2].clone()).unwrap();
    assert_eq!(empty.iter().map(|bucket| bucket[2]).sum::<f32>(), 0.0);
}

fn check_text(tensorboard: &TensorBoard, _written: &Written) {
    let points = tensorboard.wait(|tensorboard| tensorboard.points("text", "run-1", "notes"));
    let text = points[0]["text"].as_str().unwrap();
    let html = "<p>some <em>emphasis</em> &amp; &lt;tags&gt;</p>";
    assert_eq!((points.len(), points[0]["step"].as_u64(), text), (1, Some(3), html));
}

fn check_images(tensorboard: &TensorBoard, written: &Written) {
    let path = "/data/plugin/images/images?run=run-1&tag=input&sample=0";
    let points = tensorboard.wait(|tensorboard| tensorboard.json(path)?.as_array().cloned());
    let [point] = &points[..] else { panic!("{points:?}") };
    assert_eq!(point["step"].as_u64(), Some(4));
    let query = point["query"].as_str().unwrap();
    let image = tensorboard.get(&format!("/data/plugin/images/individualImage?{query}"));
    assert_eq!(image.unwrap(), written.image.png());
}

fn check_hyperparameters(tensorboard: &TensorBoard) {
    let columns = ["rate", "optimizer", "shuffle"];
    let columns = columns.map(|name| json!({"hparam": name, "includeInResult": true}));
    let request = json!({
        "allowedStatuses": ["STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING", "STATUS_UNKNOWN"],
        "colParams": columns,
        "startIndex": 0, "sliceSize": 10, "includeMetrics": true,
    });
    let groups = tensorboard.wait(|tensorboard| {
        let path = format!("/data/plugin/hparams/session_groups?request={}", escape(&request));
        let groups = tensorboard.json(&path)?["sessionGroups"].as_array()?.clone();
        let is_complete = groups.iter().all(|group| group["metricValues"][0]["value"].is_number());
        (groups.len() == 2 && is_complete).then_some(groups)
    });
    for (run, rate, status, last) in [
        ("run-1", 0.5, "STATUS_SUCCESS", 0.5 * 3.7_f32 / 50.0),
        ("run-2", 0.25, "STATUS_FAILURE", 0.25 * 3.7_f32 / 50.0),
    ] {
        let group = groups.iter().find(|group| group["hparams"]["rate"] == json!(rate)).unwrap();
        let expected = json!({"rate": rate, "optimizer": "adam", "shuffle": true});
        assert_eq!(group["hparams"], expected);
        let [session] = &group["sessions"].as_array().unwrap()[..] else { panic!("{group}") };
        assert_eq!((&session["name"], &session["status"]), (&json!(run), &json!(status)));
        let start = &session["startTimeSecs"];
        let end = &session["endTimeSecs"];
        assert!(1.7e9 < start.as_f64().unwrap() && start.as_f64() <= end.as_f64(), "{session}");
        let metric = &session["metricValues"][0];
        assert_eq!(metric["name"]["tag"], json!("loss"));
        assert_eq!(metric["value"].as_f64().unwrap() as f32, last);
    }
    let path = format!("/data/plugin/hparams/experiment?request={}", escape(&json!({})));
    let experiment = tensorboard.json(&path).unwrap();
    let infos = experiment["hparamInfos"].as_array().unwrap();
    let mut infos: Vec<_> =
        infos.iter().map(|info| (info["name"].as_str(), info["type"].as_str())).collect();
    infos.sort();
    let expected = [
        (Some("optimizer"), Some("DATA_TYPE_STRING")),
        (Some("rate"), Some("DATA_TYPE_FLOAT64")),
        (Some("shuffle"), Some("DATA_TYPE_BOOL")),
    ];
    assert_eq!(infos, expected, "{experiment}");
}

/// A running TensorBoard, which ends with this value.
struct TensorBoard {
    _process: TestProcess,
    address: String,
}

impl TensorBoard {
    /// Starts TensorBoard on a port of its choice, and waits until it listens.
    fn start(python: &Path, logs: &Path, reader: &str) -> TensorBoard {
        let mut command = Command::new(python);
        command.args(["-m", "tensorboard.main", "--host", "127.0.0.1", "--port", "0", reader]);
        command.args(["--reload_interval", "1", "--reload_multifile=false", "--logdir"]).arg(logs);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = TestProcess::start("tensorboard", &mut command);
        let lines = BufReader::new(process.child.stderr.take().unwrap()).lines();
        let (sender, receiver) = mpsc::channel();
        // The pipe is read to its end, so that TensorBoard never waits for it.
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| _ = sender.send(line)));
        let start = Instant::now();
        let mut said = Vec::new();
        loop {
            let left = LONG.saturating_sub(start.elapsed());
            let Ok(line) = receiver.recv_timeout(left) else {
                panic!("TensorBoard does not listen: {said:?}");
            };
            let address = line.split_once(" at http://").and_then(|(_, rest)| rest.split_once('/'));
            if let Some((address, _)) = address {
                return TensorBoard { _process: process, address: address.to_owned() };
            }
            said.push(line);
        }
    }

    /// Asks until there is an answer. TensorBoard reads the files once a second.
    fn wait<T>(&self, ask: impl Fn(&TensorBoard) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(answer) = ask(self) {
                return answer;
            }
            assert!(start.elapsed() < LONG, "TensorBoard does not show what was written");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits for a number of points of a scalar, and returns their steps.
    fn steps(&self, run: &str, tag: &str, count: usize) -> Vec<u64> {
        let points = self.wait(|tensorboard| {
            tensorboard.points("scalars", run, tag).filter(|points| points.len() >= count)
        });
        points.iter().map(|point| point[1].as_u64().unwrap()).collect()
    }

    /// Returns the points of a tag, if there are any.
    fn points(&self, plugin: &str, run: &str, tag: &str) -> Option<Vec<Value>> {
        let points = self.json(&format!("/data/plugin/{plugin}/{plugin}?run={run}&tag={tag}"))?;
        points.as_array().filter(|points| !points.is_empty()).cloned()
    }

    fn json(&self, path: &str) -> Option<Value> {
        serde_json::from_slice(&self.get(path)?).ok()
    }

    /// Returns the body of an answer, unless it is a refusal.
    fn get(&self, path: &str) -> Option<Vec<u8>> {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let request = format!("GET {path} HTTP/1.0\r\nHost: {}\r\n\r\n", self.address);
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&answer[..end]);
        let is_found = head.split_whitespace().nth(1) == Some("200");
        is_found.then(|| answer[end + 4..].to_vec())
    }
}

/// Escapes a JSON value for a query.
fn escape(value: &Value) -> String {
    value.to_string().bytes().map(|byte| format!("%{byte:02x}")).collect()
}

/// Returns a Python that has TensorBoard, or says why the test is skipped.
///
/// # Panics
/// If `PUSHPULL_TENSORBOARD` is set to a program that has no TensorBoard.
fn python() -> Option<PathBuf> {
    let version = |python: &Path| {
        let mut command = Command::new(python);
        command.args(["-c", "import tensorboard; print(tensorboard.__version__)"]);
        let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
        let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        match output.status.success() && !version.is_empty() {
            true => Ok(version),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    };
    if let Some(python) = std::env::var_os("PUSHPULL_TENSORBOARD").map(PathBuf::from) {
        let found = version(&python);
        found.unwrap_or_else(|error| panic!("{}: no TensorBoard: {error}", python.display()));
        return Some(python);
    }
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tensorboard/bin/python");
    let mut reasons = Vec::new();
    for python in [made, PathBuf::from("python3")] {
        match version(&python) {
            Ok(_) => return Some(python),
            Err(error) => {
                let reason = error.lines().last().unwrap_or_default().to_owned();
                reasons.push(format!("{}: {reason}", python.display()));
            }
        }
    }
    println!("SKIPPED: nothing is read by TensorBoard, no Python has it ({})", reasons.join("; "));
    None
}
